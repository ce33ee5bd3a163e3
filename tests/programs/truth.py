"""Runs a program in one process with plain torch: the truth that sharded runs are compared with.

All ranks' models share their parameters and have buffers of their own. Where ranks would talk, this adds up: a gradient
is the mean over ranks; a parameter that no rank used has none; with ShardedDataParallel, buffers are rank 0's (as
DistributedDataParallel keeps them). In FSDP's mixed precision, each forward casts the parameters once, and the cast's
own derivative brings the gradient back to full precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .course import Course, backward, evaluation, forwards
from .models import Deliberate, Tree
from .result import Checkpoint, Moment, RankRun, Tensors
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    Fail,
    Look,
    Program,
    Reload,
    Save,
    Schedule,
    SetTrainable,
    Step,
    Summon,
    Train,
    Unit,
    ZeroGrad,
)

Grads = dict[str, torch.Tensor | None]


class Truth(Course):
    """The course of a program over W simulated ranks.

    Attributes:
        trees: each rank's model.
        mean: gradients that ranks have combined.
        local: each rank's gradients that wait for that.
    """

    def __init__(self, program: Program, world_size: int, start: Checkpoint | None = None) -> None:
        super().__init__(program)
        self.world_size = world_size
        self.low = program.low_dtype
        self._build(start)

    def _build(self, start: Checkpoint | None) -> None:
        tree = Tree(self.program.model)
        if start is not None:
            tree.model.load_state_dict(start.model)
        self.named = dict(tree.model.named_parameters())
        shared = {id(p): p for p in self.named.values()}
        self.trees = [copy.deepcopy(tree, dict(shared)) for _ in range(self.world_size)]
        self._cast_buffers()
        self.freeze_late(self.named)
        for step in self.frozen_later:
            tree.set_trainable(step.path, step.names, step.trainable)
        self.make_optimizers(self.named, lambda cls, params, arguments: cls(params, **arguments))
        if start is not None:
            if start.late_added:
                self.add_late(self.named)
            for optimizer, state in zip(self.optimizers, start.optimizers, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        self.mean: Grads = dict.fromkeys(self.named)
        self.local: list[Grads] = [dict.fromkeys(self.named) for _ in self.trees]

    # ------------------------------------------------------------------ forward
    def _cast_buffers(self) -> None:
        if self.low is None or not isinstance(self.program.options, Unit):
            return
        dtype = getattr(torch, self.program.options.buffer_dtype, self.low)
        for tree in self.trees:
            for module in tree.model.modules():
                for name, b in module.named_buffers(recurse=False):
                    setattr(module, name, b.to(dtype) if b.is_floating_point() else b)

    def _sync_buffers(self) -> None:
        if self.sharded is not None and self.sharded.broadcast_buffers:
            self._buffers_of_rank_0()

    def _buffers_of_rank_0(self) -> None:
        source = dict(self.trees[0].model.named_buffers())
        for tree in self.trees[1:]:
            for name, b in tree.model.named_buffers():
                b.data.copy_(source[name])

    def _call(self, rank: int) -> Callable[..., Any]:
        model = self.trees[rank].model
        if self.low is None:
            return model
        low = {n: p.to(self.low) for n, p in self.named.items()}
        return lambda *args, **kwargs: torch.func.functional_call(model, low, args, kwargs)

    def _forward(self, rank: int, count: int) -> torch.Tensor:
        return self.loss(self._call(rank), count, rank, self.low)

    # ------------------------------------------------------------------ gradients
    def _collect(self, rank: int) -> None:
        """Moves what a backward left in ``grad`` to the rank's local gradients."""
        for name, p in self.named.items():
            if p.grad is not None:
                held = self.local[rank][name]
                self.local[rank][name] = p.grad if held is None else held + p.grad
                p.grad = None

    def _reduce(self) -> None:
        for name, p in self.named.items():
            present = [g for g in (local[name] for local in self.local) if g is not None]
            if present:
                mean = sum(present[1:], present[0]) / self.world_size
                held = self.mean[name]
                if held is None and not mean.is_sparse:
                    held = torch.zeros_like(p)  # with the parameter's strides: fused optimizers walk memory
                self.mean[name] = mean if held is None else held + mean
        self.local = [dict.fromkeys(self.named) for _ in self.local]

    def _show(self) -> None:
        for name, p in self.named.items():
            p.grad = self.mean[name]

    def _hide(self) -> None:
        for p in self.named.values():
            p.grad = None

    # ------------------------------------------------------------------ what ranks see
    def run(self) -> list[RankRun]:
        """Each rank's course."""
        steps = [self.do(step) for step in self.program.steps]
        runs = [RankRun([moments[rank] for moments in steps]) for rank in range(self.world_size)]
        if self.sharded is not None:
            saved = self._checkpoint()
            for rank, run in enumerate(runs):
                last = Moment(len(steps), "end", params=self._params(), buffers=self._buffers(rank))
                last.states = saved.optimizers
                run.moments.append(last)
                run.saved = saved
        return runs

    def _params(self) -> Tensors:
        return {n: p.detach().clone() for n, p in self.named.items()}

    def _buffers(self, rank: int) -> Tensors:
        return {n: b.detach().clone() for n, b in self.trees[rank].model.named_buffers()}

    def _states(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(o.state_dict()) for o in self.optimizers]

    def _checkpoint(self) -> Checkpoint:
        model = {k: v.detach().clone() for k, v in self.trees[0].model.state_dict().items()}
        return Checkpoint(model, self._states(), self.late_added)

    def _state(self, rank: int) -> Tensors:
        options = self.program.options
        if rank != 0 and isinstance(options, Unit) and options.state_dict_on_rank_0_only:
            return {}
        full = self.trees[rank].model.state_dict()
        wide = self.low is not None
        return {
            n: t.detach().to(torch.float32 if wide and t.is_floating_point() else t.dtype, copy=True)
            for n, t in full.items()
        }

    # ------------------------------------------------------------------ steps
    def do(self, step: AnyStep) -> list[Moment]:
        """One step; what each rank saw."""
        index = self.next_index()
        moments = [Moment(index, type(step).__name__) for _ in self.trees]
        if isinstance(step, Train):
            self._train(step, moments)
        elif isinstance(step, Evaluate):
            self._evaluate(step, moments)
        elif isinstance(step, Fail):
            self._fail(step)
        elif isinstance(step, ZeroGrad):
            self._zero_grad(step)
        elif isinstance(step, Clip):
            self._clip(step, moments)
        elif isinstance(step, Step):
            self._step(step, moments)
        elif isinstance(step, SetTrainable):
            self.frozen_later.append(step)
            self.trees[0].set_trainable(step.path, step.names, step.trainable)
        elif isinstance(step, AddGroup):
            self.add_late(self.named)
        elif isinstance(step, Save):
            for rank, moment in enumerate(moments):
                moment.states = self._states() if step.recipient in (-1, rank) else None
        elif isinstance(step, Schedule):
            rates = self.schedule()
            for moment in moments:
                moment.lrs = rates
        elif isinstance(step, Reload):
            self._reload(step)
        elif isinstance(step, Summon):
            self._summon(step, moments)
        if self.sharded is None and isinstance(step, (Look, Reload)):
            for rank, moment in enumerate(moments):
                moment.state = self._state(rank)
        return moments

    def _train(self, step: Train, moments: list[Moment]) -> None:
        losses: list[list[torch.Tensor]] = [[] for _ in moments]
        for count in [self.next_count() for _ in range(forwards(step))]:
            if not step.no_sync:
                self._sync_buffers()
            for rank, own in enumerate(losses):
                own.append(self._forward(rank, count))
        for rank, (own, moment) in enumerate(zip(losses, moments, strict=True)):
            backward(step, own)
            self._collect(rank)
            moment.losses = [loss.item() for loss in own]
        if not step.no_sync:
            self._reduce()
            self._sync_buffers()
            if self.sharded is not None:
                grads = {n: None if g is None else g.clone() for n, g in self.mean.items()}
                for moment in moments:
                    moment.grads = grads

    def _step(self, step: Step, moments: list[Moment]) -> None:
        if step.closure:
            count = self.next_count()
            for optimizer in self.optimizers:
                optimizer.step(self._closure(count, moments))
                self.mean = {n: p.grad for n, p in self.named.items()}
        else:
            self._show()
            for optimizer in self.optimizers:
                optimizer.step()
        self._hide()
        self._sync_buffers()
        if self.sharded is not None:
            for rank, moment in enumerate(moments):
                moment.params, moment.buffers = self._params(), self._buffers(rank)

    def _closure(self, count: int, moments: list[Moment]) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            self._hide()
            self._zero_grad(ZeroGrad())
            self._sync_buffers()
            losses = []
            for rank, moment in enumerate(moments):
                loss = self._forward(rank, count)
                loss.backward()
                self._collect(rank)
                losses.append(loss.detach())
                moment.losses.append(loss.item())
            self._reduce()
            self._sync_buffers()
            self._show()
            return torch.stack(losses).mean()

        return closure

    def _evaluate(self, step: Evaluate, moments: list[Moment]) -> None:
        count = self.next_count()
        self._sync_buffers()
        for rank, moment in enumerate(moments):
            if rank == 0 or not step.only_rank_0:
                with evaluation(step, self.trees[rank].model):
                    moment.losses = [self._forward(rank, count).item()]

    def _fail(self, step: Fail) -> None:
        if step.where == "no_sync":
            return
        count = self.next_count()
        self._sync_buffers()
        for rank, tree in enumerate(self.trees):
            model: Any = tree.model
            model.fail = step.where
            try:
                self._forward(rank, count).backward()
            except Deliberate:
                pass
            finally:
                model.fail = ""
        self._hide()
        self._zero_grad(ZeroGrad())

    def _zero_grad(self, step: ZeroGrad) -> None:
        names = set(self.named)
        if step.target == "optimizer":
            owned = {p for o in self.optimizers for g in o.param_groups for p in g["params"]}
            names = {n for n, p in self.named.items() if p in owned}
        for name in names:
            for grads in [self.mean, *self.local]:
                held = grads[name]
                if held is not None:
                    grads[name] = None if step.set_to_none else torch.zeros_like(held)

    def _clip(self, step: Clip, moments: list[Moment]) -> None:
        self._show()
        for optimizer in self.optimizers:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            norm = nn.utils.clip_grad_norm_(params, step.max_norm, step.norm_type).item()
            for moment in moments:
                moment.norms.append(norm)
        self._hide()

    def _summon(self, step: Summon, moments: list[Moment]) -> None:
        for moment in moments:
            moment.summoned = self._params()
        if step.write:
            with torch.no_grad():
                for p in self.named.values():
                    p.add_(0.01)

    # ------------------------------------------------------------------ saving and loading
    def _reload(self, step: Reload) -> None:
        # ranks keep their own, but for gradients and rank 0's state
        if isinstance(self.program.options, Unit):
            self._zero_grad(ZeroGrad())
            if step.form == "consolidated" or (
                step.form == "full" and self.program.options.state_dict_on_rank_0_only
            ):
                self._buffers_of_rank_0()
            return
        states = self.scheduler_states()
        self._build(self._checkpoint())
        self.load_schedulers(states)

    def go_on_from(self, other: Truth, own_buffers: bool) -> None:
        """Takes over values, optimizer state and counters of a run with maybe another number of ranks.

        Args:
            own_buffers: each rank gets the buffers of the same rank, not those of rank 0.
        """
        for rank, tree in enumerate(self.trees):
            tree.model.load_state_dict(other.trees[rank if own_buffers else 0].model.state_dict())
        for mine, theirs in zip(self.optimizers, other.optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        self.count = other.count


def run_truth(program: Program, world_size: int, start: Checkpoint | None = None) -> list[RankRun]:
    """Each rank's course through ``program``, from one process."""
    return Truth(program, world_size, start).run()
