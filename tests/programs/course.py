"""What all runs of a program share: counters of forwards, batches, optimizers, what was frozen or added on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .models import batch, loss_of, route, seed_generators
from .optimizers import OPTIMIZERS, SCHEDULERS, arguments_of, group_options, split_among_optimizers
from .spec import Evaluate, Program, SetTrainable, Train

Construct = Callable[[Any, Any, dict[str, Any]], Optimizer]


class Course:
    """Where a run of a program stands.

    Attributes:
        count: number of forwards so far.
        device: where forwards are computed.
        frozen_later: :class:`SetTrainable` steps so far, which a fresh model repeats.
    """

    device = torch.device("cpu")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sharded = program.sharded
        self.index = self.count = 0
        self.late_added = False
        self.frozen_later: list[SetTrainable] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler | None] = []

    def next_count(self) -> int:
        """A number for the next forward; its batch depends on it."""
        self.count += 1
        return self.count

    def next_index(self) -> int:
        """Number of the next step."""
        self.index += 1
        return self.index - 1

    def loss(self, model: Any, count: int, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of a rank's batch; dropout masks depend on forward and rank only."""
        program = self.program
        x, y = (t.to(self.device) for t in batch(program.model, program.data_seed, count, rank))
        seed_generators(program.data_seed * 7919 + count * 97 + rank)
        return loss_of(
            model(x if dtype is None else x.to(dtype), route=route(program.routing, count, rank)), y
        )

    # ------------------------------------------------------------------ optimizers
    def late_names(self, names: Mapping[str, Any]) -> list[str]:
        """Parameters that no optimizer has before the AddGroup step."""
        if self.sharded is None or not self.sharded.late:
            return []
        prefix = f"nodes.{len(self.program.model.nodes) - 1}."
        return [n for n in names if n.startswith(prefix)]

    def freeze_late(self, named: Mapping[str, nn.Parameter]) -> None:
        """Before construction, where a program says so."""
        if self.sharded is not None and self.sharded.late == "frozen":
            for name in self.late_names(named):
                named[name].requires_grad_(False)

    def make_optimizers(self, named: Mapping[str, nn.Parameter], construct: Construct) -> None:
        """The program's optimizers and schedulers; ``construct(class, params, arguments)`` makes one."""
        spec, late = self.program.optimizer, set(self.late_names(named))
        choice = OPTIMIZERS[spec.name]
        names = [n for n in named if n not in late]
        self.optimizers = []
        for part in split_among_optimizers(names, 1 if self.sharded is None else self.sharded.optimizers):
            params = arguments_of(spec, [(n, named[n]) for n in part])
            self.optimizers.append(construct(choice.cls, params, {"lr": spec.lr, **choice.arguments}))
        make = SCHEDULERS.get(spec.scheduler)
        self.schedulers = [make(o, spec.lr) if make else None for o in self.optimizers]

    def add_late(self, named: Mapping[str, nn.Parameter]) -> None:
        late = [(n, named[n]) for n in self.late_names(named)]
        for _, p in late:
            p.requires_grad_(True)
        spec = self.program.optimizer
        params = late if spec.form in ("named", "named_groups") else [p for _, p in late]
        self.optimizers[-1].add_param_group({"params": params, **group_options(spec, 4)})
        self.late_added = True

    def schedule(self) -> list[float]:
        """Each scheduler steps; all rates after it."""
        for scheduler in self.schedulers:
            if scheduler is not None:
                scheduler.step()
        return [g["lr"] for o in self.optimizers for g in o.param_groups]

    def scheduler_states(self) -> list[dict[str, Any] | None]:
        return [None if s is None else s.state_dict() for s in self.schedulers]

    def load_schedulers(self, states: list[dict[str, Any] | None]) -> None:
        for scheduler, state in zip(self.schedulers, states, strict=True):
            if scheduler is not None and state is not None:
                scheduler.load_state_dict(state)


def forwards(step: Train) -> int:
    """How many forwards a training step has."""
    return 2 if step.mode in ("two", "sum") else 1


def backward(step: Train, losses: list[torch.Tensor]) -> None:
    """Runs the backward of a training step."""
    if step.mode == "sum":
        (losses[0] + losses[1]).backward()
    elif step.mode == "twice":
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    else:
        for loss in losses:
            loss.backward()


class evaluation:
    """Context in which a forward of :class:`Evaluate` runs."""

    def __init__(self, step: Evaluate, model: nn.Module) -> None:
        self._model = model if step.mode != "dropped" else None
        self._context: Any = {
            "no_grad": torch.no_grad, "inference": torch.inference_mode, "dropped": torch.enable_grad,
        }[step.mode]()  # fmt: skip

    def __enter__(self) -> None:
        if self._model is not None:
            self._model.eval()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        if self._model is not None:
            self._model.train()
