"""A trainer in the manner of Lightning 1.x: a module with hooks, and a strategy that shards what it is given.

What was ``from fairscale...`` is ``from shardkit...``; nothing else knows which of the two it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from shardkit.nn.data_parallel.sharded_ddp import ShardedDataParallel
from shardkit.optim import OSS
from shardkit.optim.grad_scaler import ShardedGradScaler


class Module(nn.Module):
    """What a user writes: hooks, all of them optional but two."""

    trainer: Trainer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


class Wrapper(nn.Module):
    """Its forward is the module's step, so that what wraps it sees every pass."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        step = self.module.training_step if self.module.training else self.module.validation_step
        return step(*inputs)


class SingleDeviceStrategy:
    """One process."""

    is_global_zero = True
    world_size = 1

    def __init__(self, precision: str = "32") -> None:
        self.precision = precision

    def setup(self, module: Module) -> None:
        self.lightning_module = module
        self.optimizers, self.schedulers = module.configure_optimizers()
        self.scaler: Any = self.make_scaler()
        self.model: nn.Module = Wrapper(module)

    def make_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=64.0, enabled=self.precision == "16")

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def block_backward_sync(self) -> Any:
        return contextlib.nullcontext()

    def optimizer_step(self, optimizer: Optimizer, clip: float | None) -> None:
        self.scaler.unscale_(optimizer)
        self.lightning_module.on_before_optimizer_step(optimizer)
        if clip is not None:
            self.clip_gradients(optimizer, clip)
        self.scaler.step(optimizer)
        self.scaler.update()

    def clip_gradients(self, optimizer: Optimizer, clip: float) -> None:
        nn.utils.clip_grad_norm_(self.lightning_module.parameters(), clip)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def barrier(self) -> None: ...


class ShardedStrategy(SingleDeviceStrategy):
    """OSS and ShardedDataParallel."""

    def setup(self, module: Module) -> None:
        self.world_size, self.is_global_zero = dist.get_world_size(), dist.get_rank() == 0
        super().setup(module)
        sharded = [self._reinit_with_oss(o) for o in self.optimizers]
        for scheduler in self.schedulers:
            scheduler.optimizer = sharded[self.optimizers.index(scheduler.optimizer)]
        self.optimizers = sharded
        self.model = ShardedDataParallel(
            Wrapper(module),
            sharded_optimizer=sharded,
            reduce_buffer_size=0 if self.precision == "16" else 2**10,
        )

    def _reinit_with_oss(self, optimizer: Optimizer) -> OSS:
        if isinstance(optimizer, OSS):
            return optimizer
        return OSS(params=optimizer.param_groups, optim=type(optimizer), **optimizer.defaults)

    def make_scaler(self) -> Any:
        return ShardedGradScaler(init_scale=64.0, enabled=self.precision == "16")

    def block_backward_sync(self) -> Any:
        return self.model.no_sync()

    def clip_gradients(self, optimizer: Optimizer, clip: float) -> None:
        if not isinstance(optimizer, OSS):
            raise TypeError("an optimizer that was not sharded")
        optimizer.clip_grad_norm(clip)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, OSS):
            optimizer.consolidate_state_dict()
        return optimizer.state_dict() if self.is_global_zero else {}

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value / self.world_size

    def barrier(self) -> None:
        dist.barrier()


class Trainer:
    """Epochs, accumulation, clipping, schedules, validation and checkpoints."""

    def __init__(
        self, strategy: SingleDeviceStrategy, *, max_epochs: int, accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
    ) -> None:  # fmt: skip
        self.strategy = strategy
        self.max_epochs, self.accumulate = max_epochs, accumulate_grad_batches
        self.clip = gradient_clip_val
        self.current_epoch = self.global_step = 0
        self.logged: list[dict[str, float]] = []

    def fit(self, module: Module, train: list[Any], valid: list[Any], ckpt_path: str | None = None) -> None:
        module.trainer = self
        self.strategy.setup(module)
        if ckpt_path is not None:
            self._restore(ckpt_path)
        while self.current_epoch < self.max_epochs:
            module.on_train_epoch_start()
            self._train_epoch(train)
            for scheduler in self.strategy.schedulers:
                scheduler.step()
            self._validate(valid)
            self.current_epoch += 1

    def _train_epoch(self, batches: list[Any]) -> None:
        strategy = self.strategy
        strategy.model.train()
        for i, batch in enumerate(batches):
            is_last = (i + 1) % self.accumulate == 0 or i + 1 == len(batches)
            with contextlib.nullcontext() if is_last else strategy.block_backward_sync():
                loss = strategy.model(batch, i)
                strategy.backward(loss / self.accumulate)
            if is_last:
                for optimizer in strategy.optimizers:
                    strategy.optimizer_step(optimizer, self.clip)
                    optimizer.zero_grad()
                self.global_step += 1
                self.logged.append({"loss": float(strategy.reduce(loss.detach()))})

    @torch.no_grad()
    def _validate(self, batches: list[Any]) -> None:
        self.strategy.model.eval()
        losses = [self.strategy.model(batch, i) for i, batch in enumerate(batches)]
        self.logged.append({"valid": float(self.strategy.reduce(torch.stack(losses).mean()))})

    # ------------------------------------------------------------ checkpoints
    def save_checkpoint(self, path: str) -> None:
        strategy = self.strategy
        module = strategy.lightning_module
        checkpoint: dict[str, Any] = {
            "epoch": self.current_epoch,
            "global_step": self.global_step,
            "state_dict": module.state_dict(),
            "optimizer_states": [strategy.optimizer_state(o) for o in strategy.optimizers],
            "lr_schedulers": [s.state_dict() for s in strategy.schedulers],
            "scaler": strategy.scaler.state_dict(),
        }
        module.on_save_checkpoint(checkpoint)
        if strategy.is_global_zero:
            torch.save(checkpoint, path)
        strategy.barrier()

    def _restore(self, path: str) -> None:
        strategy = self.strategy
        checkpoint = torch.load(path)
        strategy.lightning_module.on_load_checkpoint(checkpoint)
        strategy.lightning_module.load_state_dict(checkpoint["state_dict"])
        for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(strategy.schedulers, checkpoint["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if checkpoint["scaler"]:
            strategy.scaler.load_state_dict(checkpoint["scaler"])
        self.current_epoch, self.global_step = checkpoint["epoch"], checkpoint["global_step"]


class Classifier(Module):
    """What a user's module looks like: a backbone that is frozen for an epoch, two param groups, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7))
        self.head = nn.Linear(7, 4)
        self.temperature = nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.backbone(x))) * self.temperature
        return y

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    validation_step = training_step

    def on_train_epoch_start(self) -> None:
        self.backbone[0].requires_grad_(self.trainer.current_epoch > 0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])

    def configure_optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        groups = [
            {"params": [p for n, p in self.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
        ]
        first = torch.optim.AdamW(groups, lr=0.05, eps=1e-3)
        second = torch.optim.SGD([self.temperature], lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (first, second)]


def batches_of(
    ranks: Iterable[int], count: int, first: int = 0
) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
    """Batches of these ranks, end to end."""
    for i in range(first, first + count):
        parts = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * i + rank)
            x = torch.randn(5, 6, generator=generator)
            parts.append((x, (x.sum(dim=1) > 0).long() + 2 * (x[:, 0] > 0).long()))
        yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
