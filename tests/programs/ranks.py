"""Runs a program on real ranks: this process, or this thread, is one of them.

The same interpreter drives fairscale, shardkit at fairscale's paths, and shardkit's own API; only constructors differ,
and what is looked at: :mod:`.owning_ranks` for OSS and ShardedDataParallel, :mod:`.unit_ranks` for FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardkit.backend import backend_for
from shardkit.xla.xla_model import xla_device

from .course import Course, backward, evaluation, forwards
from .models import Deliberate, Model, Tree
from .result import Moment, RankRun, Tensors
from .spec import (
    AnyStep,
    Clip,
    Evaluate,
    Fail,
    Program,
    Reload,
    Schedule,
    SetTrainable,
    Step,
    Train,
    ZeroGrad,
)


class World:
    """All ranks: a process group, or those of the backend whose rank this thread is.

    Attributes:
        device: where a rank computes.
    """

    def __init__(self) -> None:
        self.device = xla_device()  # of a replica; else the CPU
        self._backend = None if dist.is_initialized() else backend_for([torch.empty(0, device=self.device)])
        self._group = None if self._backend is None else self._backend.group()
        self.rank = dist.get_rank() if self._group is None else self._group.rank
        self.size = dist.get_world_size() if self._group is None else self._group.world_size

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self._group is not None:
            return self._group.broadcast_object(value, 0)
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, on all ranks."""
        if self._group is not None:
            return self._group.all_gather_object(value)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts

    def end_step(self) -> None:
        """Runs what is recorded, where execution is lazy."""
        if self._backend is not None:
            self._backend.mark_step()


def tensors(state: dict[str, Any]) -> Tensors:
    """Copies on the CPU, without the attributes that libraries put on tensors."""
    on_host = {n: t.detach().cpu() for n, t in state.items()}
    return {n: torch.empty_like(t).copy_(t) for n, t in on_host.items()}


class Rank(Course):
    """This rank's course through a program.

    Attributes:
        wrapper: what is called in place of the model.
    """

    tree: Tree
    wrapper: Any

    def __init__(self, library: str, program: Program) -> None:
        super().__init__(program)
        self.library = library
        self.world = World()
        self.rank, self.device = self.world.rank, self.world.device

    @property
    def model(self) -> Model:
        return self.tree.modules[()]  # type: ignore[return-value]

    def run(self) -> RankRun:
        """What this rank saw at each step."""
        return RankRun([self.do(step) for step in self.program.steps])

    def do(self, step: AnyStep) -> Moment:
        """One step; what this rank saw."""
        moment = Moment(self.next_index(), type(step).__name__)
        if isinstance(step, Train):
            self._train(step, moment)
        elif isinstance(step, Evaluate):
            self._evaluate(step, moment)
        elif isinstance(step, Fail):
            self._fail(step)
        elif isinstance(step, ZeroGrad):
            self._zero_grad(step)
        elif isinstance(step, Clip):
            moment.norms = self.clip(step)
        elif isinstance(step, Step):
            count = self.next_count() if step.closure else 0
            for optimizer in self.optimizers:
                optimizer.step(self._closure(count, moment) if step.closure else None)
        elif isinstance(step, SetTrainable):
            self.freeze(step)
            self.frozen_later.append(step)
        elif isinstance(step, Schedule):
            moment.lrs = self.schedule()
        elif isinstance(step, Reload):
            self.reload(step)
        self.world.end_step()
        self.look(step, moment)
        return moment

    # ------------------------------------------------------------------ what the two kinds of sharding do differently
    def clip(self, step: Clip) -> list[float]:
        raise NotImplementedError

    def freeze(self, step: SetTrainable) -> None:
        self.tree.set_trainable(step.path, step.names, step.trainable)

    def reload(self, step: Reload) -> None:
        raise NotImplementedError

    def look(self, step: AnyStep, moment: Moment) -> None:
        """Steps that only look, and what is looked at after others."""

    # ------------------------------------------------------------------ steps
    def _forward(self, count: int) -> torch.Tensor:
        return self.loss(self.wrapper, count, self.rank)

    def _train(self, step: Train, moment: Moment) -> None:
        with self.wrapper.no_sync() if step.no_sync else nullcontext():
            losses = [self._forward(self.next_count()) for _ in range(forwards(step))]
            backward(step, losses)
        moment.losses = [loss.item() for loss in losses]

    def _evaluate(self, step: Evaluate, moment: Moment) -> None:
        count = self.next_count()
        if self.rank == 0 or not step.only_rank_0:
            with evaluation(step, self.wrapper):
                moment.losses = [self._forward(count).item()]

    def _closure(self, count: int, moment: Moment) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            self.wrapper.zero_grad(set_to_none=True)
            loss = self._forward(count)
            loss.backward()
            moment.losses.append(loss.item())
            return loss.detach()

        return closure

    def _fail(self, step: Fail) -> None:
        self.model.fail = step.where
        try:
            if step.where == "no_sync":
                with self.wrapper.no_sync():
                    raise Deliberate
            self._forward(self.next_count()).backward()
        except Deliberate:
            pass
        else:
            raise AssertionError(f"the {step.where} was meant to fail")
        finally:
            self.model.fail = ""
        if step.where != "no_sync":
            self.wrapper.zero_grad(set_to_none=True)

    def _zero_grad(self, step: ZeroGrad) -> None:
        if step.target == "optimizer":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step.set_to_none)
        else:
            model = self.model if step.target == "module" else self.wrapper
            model.zero_grad(set_to_none=step.set_to_none)
