"""An image task in the manner of ClassyVision: phases, hooks, schedules over "where", ZeRO as an optimizer.

Written from its documentation, with swapped imports. ``ZeRO`` goes around another optimizer of the task's; with it, the
model is a ShardedDataParallel and the loss scaler a ShardedGradScaler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.nn.data_parallel import ShardedDataParallel
from shardkit.optim.grad_scaler import ShardedGradScaler
from shardkit.optim.oss import OSS

Batch = tuple[torch.Tensor, torch.Tensor]
Schedule = Callable[[float], float]  # of where we are, from 0 to 1


def cosine(start: float, end: float) -> Schedule:
    return lambda where: end + (start - end) * (1 + math.cos(math.pi * where)) / 2


# ------------------------------------------------------------------ optimizers
class TaskOptimizer:
    """An optimizer of torch's, whose options may be schedules; each group may have its own."""

    kind: type[torch.optim.Optimizer]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.schedules: list[dict[str, Schedule]] = []
        self.optimizer: Any = None

    def prepare(self, groups: list[dict[str, Any]]) -> None:
        plain = []
        for group in groups:
            merged = {**self.options, **group}
            self.schedules.append({k: v for k, v in merged.items() if k != "params" and callable(v)})
            plain.append({k: v(0.0) if k != "params" and callable(v) else v for k, v in merged.items()})
        self.optimizer = self.kind(plain, **self.plain_options())

    def plain_options(self) -> dict[str, Any]:
        return {k: v(0.0) if callable(v) else v for k, v in self.options.items()}

    def step(self, where: float, scaler: Any) -> None:
        for group, schedules in zip(self.optimizer.param_groups, self.schedules, strict=True):
            group.update({k: schedule(where) for k, schedule in schedules.items()})
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def get_state(self) -> dict[str, Any]:
        return {"optim": self.optimizer.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optim"])

    def consolidate(self) -> None: ...


class SGD(TaskOptimizer):
    kind = torch.optim.SGD


class AdamW(TaskOptimizer):
    kind = torch.optim.AdamW


class ZeRO(TaskOptimizer):
    """Shards what another optimizer would keep."""

    def __init__(self, base_optimizer: TaskOptimizer) -> None:
        super().__init__()
        self.base = base_optimizer

    def prepare(self, groups: list[dict[str, Any]]) -> None:
        self.base.prepare(groups)
        self.schedules = self.base.schedules
        self.optimizer = OSS(
            params=self.base.optimizer.param_groups,
            optim=type(self.base.optimizer),
            **self.base.plain_options(),
        )

    def consolidate(self) -> None:
        self.optimizer.consolidate_state_dict(recipient_rank=0)


# ------------------------------------------------------------------ hooks
class Hook:
    def on_start(self, task: Task) -> None: ...
    def on_phase_start(self, task: Task) -> None: ...
    def on_step(self, task: Task) -> None: ...
    def on_phase_end(self, task: Task) -> None: ...
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None: ...


class AverageOfWeights(Hook):
    """An exponential moving average of the model's state, which test phases see."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}
        self.trained: dict[str, torch.Tensor] = {}

    def on_start(self, task: Task) -> None:
        if not self.average:
            self.average = self._copy(task)

    @staticmethod
    def _copy(task: Task) -> dict[str, torch.Tensor]:
        return {k: v.detach().clone() for k, v in task.base_model.state_dict().items()}

    def on_phase_start(self, task: Task) -> None:
        if not task.is_train:
            self.trained = self._copy(task)
            task.base_model.load_state_dict(self.average)

    def on_step(self, task: Task) -> None:
        for name, value in task.base_model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - self.decay)
            else:
                self.average[name].copy_(value)

    def on_phase_end(self, task: Task) -> None:
        if not task.is_train:
            task.base_model.load_state_dict(self.trained)

    def get_state(self) -> dict[str, Any]:
        return {"average": self.average}

    def set_state(self, state: dict[str, Any]) -> None:
        self.average = {k: v.clone() for k, v in state["average"].items()}


class Checkpoint(Hook):
    """A file after every phase of training, by rank 0; the optimizer's state comes to it first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_phase_end(self, task: Task) -> None:
        if not task.is_train:
            return
        task.optimizer.consolidate()
        if task.is_primary:
            torch.save(task.get_state(), self.folder / f"phase{task.phase}.pt")


# ------------------------------------------------------------------ the task
@dataclass(frozen=True)
class Options:
    """What a config file says."""

    zero: bool = True
    optimizer: str = "sgd"
    amp: torch.dtype | None = None
    init_scale: float = 2.0**8
    clip_grad_norm: float | None = None
    optimizer_period: int = 1


class Net(nn.Module):
    """A trunk with batch norms, for images [B, 3, 6, 6], and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
            nn.Conv2d(5, 7, 3), nn.BatchNorm2d(7), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.trunk(x).mean(dim=(2, 3)))
        return y


class Task:
    """Phases of training and of testing, one after the other."""

    def __init__(self, options: Options, hooks: Sequence[Hook], state: dict[str, Any] | None = None) -> None:
        self.options, self.hooks = options, hooks
        self.is_primary = not options.zero or dist.get_rank() == 0
        self.phase = self.updates = 0
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.scales: list[float] = []
        torch.manual_seed(3)
        self.base_model = Net()
        self.optimizer = self.make_optimizer()
        self.optimizer.prepare(self.groups())
        self.scaler: Any = None
        if options.amp is not None:
            scale: dict[str, Any] = {"init_scale": options.init_scale, "backoff_factor": 2.0**-14}
            self.scaler = ShardedGradScaler(**scale) if options.zero else torch.amp.GradScaler("cpu", **scale)
        self.model: Any = self.base_model
        if options.zero:
            self.model = ShardedDataParallel(self.base_model, sharded_optimizer=self.optimizer.optimizer)
        if state is not None:
            self.set_state(state)
        for hook in hooks:
            hook.on_start(self)

    @property
    def is_train(self) -> bool:
        return self.phase % 2 == 0

    def make_optimizer(self) -> TaskOptimizer:
        base: TaskOptimizer = (
            SGD(lr=cosine(0.2, 0.002), momentum=0.9, nesterov=True, weight_decay=1e-2)
            if self.options.optimizer == "sgd"
            else AdamW(lr=cosine(0.05, 0.0), eps=1e-3, weight_decay=cosine(0.01, 0.1))
        )
        return ZeRO(base) if self.options.zero else base

    def groups(self) -> list[dict[str, Any]]:
        """No decay for norms and biases; the head has another rate."""
        trunk = list(self.base_model.trunk.parameters())
        return [
            {"params": [p for p in trunk if p.dim() > 1]},
            {"params": [p for p in trunk if p.dim() == 1], "weight_decay": 0.0},
            {"params": list(self.base_model.head.parameters()), "lr": cosine(0.1, 0.01)},
        ]

    # -------------------------------------------------------------- phases
    def run_phase(self, batches: Sequence[Any], total_updates: int) -> None:
        """Batches of training make a step each ``optimizer_period``."""
        self.model.train(self.is_train)
        for hook in self.hooks:
            hook.on_phase_start(self)
        for number, batch in enumerate(batches):
            if self.is_train:
                self.train_step(batch, number, self.updates / total_updates)
            else:
                self.eval_step(batch)
        for hook in self.hooks:
            hook.on_phase_end(self)
        self.phase += 1

    def precision(self) -> Any:
        if self.options.amp is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.options.amp)

    def loss(self, batch: Batch) -> torch.Tensor:
        with self.precision():
            return F.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=0.1)

    def train_step(self, batch: Any, number: int, where: float) -> None:
        period = self.options.optimizer_period
        if number % period == 0:
            self.optimizer.optimizer.zero_grad()
        is_update = (number + 1) % period == 0
        with contextlib.nullcontext() if is_update or not self.options.zero else self.model.no_sync():
            self.losses.append(self.forward_backward(batch))
        if not is_update:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer.optimizer)
        if self.options.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.optimizer.parameters(), self.options.clip_grad_norm)
        self.optimizer.step(where, self.scaler)
        self.rates.append([group["lr"] for group in self.optimizer.optimizer.param_groups])
        self.scales.append(0.0 if self.scaler is None else self.scaler.get_scale())
        self.updates += 1
        for hook in self.hooks:
            hook.on_step(self)

    def forward_backward(self, batch: Any) -> float:
        loss = self.loss(batch)
        self.backward(loss / self.options.optimizer_period)
        return loss.item()

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    @torch.no_grad()
    def eval_step(self, batch: Any) -> None:
        self.losses.append(float(self.loss(batch)))

    # -------------------------------------------------------------- state
    def get_state(self) -> dict[str, Any]:
        return {
            "base_model": self.base_model.state_dict(),
            "optimizer": self.optimizer.get_state(),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "hooks": {type(hook).__name__: hook.get_state() for hook in self.hooks},
            "phase": self.phase,
            "updates": self.updates,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.base_model.load_state_dict(state["base_model"])
        self.optimizer.set_state(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for hook in self.hooks:
            hook.set_state(state["hooks"][type(hook).__name__])
        self.phase, self.updates = state["phase"] + 1, state["updates"]
