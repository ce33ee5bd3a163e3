"""Runs a program in one process with plain torch: the truth that sharded runs are compared with.

All ranks' models share their parameters and have buffers of their own. Where ranks would talk, this adds up:
a gradient is the mean over ranks, buffers are rank 0's (as DistributedDataParallel keeps them).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from .build import Course, build_optimizers, late_names, scheduler_for
from .models import Model, batch, build_model, loss_of, route
from .result import Checkpoint, Moment, RankRun, Tensors
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    FailInBackward,
    FailInNoSync,
    Program,
    Reload,
    Save,
    Schedule,
    SetTrainable,
    Step,
    Train,
    ZeroGrad,
)

Grads = dict[str, torch.Tensor | None]


class Truth(Course):
    """The course of a program over W simulated ranks."""

    def __init__(self, program: Program, world_size: int, start: Checkpoint | None = None) -> None:
        super().__init__(program)
        self.world_size = world_size
        self._build(start)

    def _build(self, start: Checkpoint | None) -> None:
        model = build_model(self.program.model)
        if start is not None:
            model.load_state_dict(start.model)
        self.named = dict(model.named_parameters())
        shared = {id(p): p for p in model.parameters()}
        self.models: list[Model] = [copy.deepcopy(model, dict(shared)) for _ in range(self.world_size)]
        late = late_names(self.program, model)
        if self.program.options.late == "frozen":
            for name in late:
                self.named[name].requires_grad_(False)
        self.apply_trainable(model)
        self.optimizers: list[Optimizer] = build_optimizers(
            self.program, model, lambda cls, p, kw: cls(p, **kw)
        )
        self.schedulers = [scheduler_for(self.program, o) for o in self.optimizers]
        if start is not None:
            if start.late_added:
                self._add_late()
            for optimizer, state in zip(self.optimizers, start.optimizers, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        self.mean: Grads = dict.fromkeys(self.named)
        self.local: list[Grads] = [dict.fromkeys(self.named) for _ in range(self.world_size)]

    # ------------------------------------------------------------------ gradients and buffers
    def _sync_buffers(self) -> None:
        if not self.program.options.broadcast_buffers:
            return
        source = dict(self.models[0].named_buffers())
        for other in self.models[1:]:
            for name, b in other.named_buffers():
                b.data.copy_(source[name])

    def _collect(self, rank: int) -> None:
        """Moves what a backward left in ``grad`` to the rank's local gradients."""
        for name, p in self.named.items():
            if p.grad is not None:
                held = self.local[rank][name]
                self.local[rank][name] = p.grad if held is None else held + p.grad
                p.grad = None

    def _reduce(self) -> None:
        for name in self.named:
            parts = [g[name] for g in self.local]
            present = [g for g in parts if g is not None]
            if present:
                total = present[0].clone()
                for g in present[1:]:
                    total = total + g
                mean = total / self.world_size
                held = self.mean[name]
                self.mean[name] = mean if held is None else held + mean
        self.local = [dict.fromkeys(self.named) for _ in range(self.world_size)]

    def _show(self) -> None:
        for name, p in self.named.items():
            p.grad = self.mean[name]

    def _hide(self) -> None:
        for p in self.named.values():
            p.grad = None

    def _forward(self, rank: int, count: int) -> torch.Tensor:
        x, y = batch(self.program.model, self.program.data_seed, count, rank)
        self.seed(count, rank)
        return loss_of(self.models[rank](x, route=route(self.program.routing, count, rank)), y)

    # ------------------------------------------------------------------ steps
    def run(self) -> list[RankRun]:
        """Each rank's course."""
        runs = [RankRun([], []) for _ in range(self.world_size)]
        for index, step in enumerate(self.program.steps):
            moments = [Moment(index, type(step).__name__) for _ in range(self.world_size)]
            self._step(step, moments)
            for run, moment in zip(runs, moments, strict=True):
                run.moments.append(moment)
        states = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
        for rank, run in enumerate(runs):
            last = Moment(len(self.program.steps), "end")
            last.params, last.buffers, last.states = self._params(), self._buffers(rank), states
            run.moments.append(last)
            run.checkpoint = self._checkpoint()
        return runs

    def _params(self) -> Tensors:
        return {n: p.detach().clone() for n, p in self.named.items()}

    def _buffers(self, rank: int) -> Tensors:
        return {n: b.detach().clone() for n, b in self.models[rank].named_buffers()}

    def _checkpoint(self) -> Checkpoint:
        model = {k: v.detach().clone() for k, v in self.models[0].state_dict().items()}
        return Checkpoint(model, [copy.deepcopy(o.state_dict()) for o in self.optimizers], self.late_added)

    def _step(self, step: AnyStep, moments: list[Moment]) -> None:
        if isinstance(step, Train):
            self._train(step, moments)
        elif isinstance(step, FailInNoSync):
            pass
        elif isinstance(step, FailInBackward):
            self._fail_in_backward()
        elif isinstance(step, ZeroGrad):
            self._zero_grad(step)
        elif isinstance(step, Step):
            self._optimize(step, moments)
        elif isinstance(step, Clip):
            self._clip(step, moments)
        elif isinstance(step, SetTrainable):
            self.set_trainable(self.models[0], step)
        elif isinstance(step, AddGroup):
            self._add_late()
        elif isinstance(step, Evaluate):
            self._evaluate(step, moments)
        elif isinstance(step, Save):
            for rank, moment in enumerate(moments):
                if step.recipient in (-1, rank):
                    moment.states = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
        elif isinstance(step, Reload):
            self._reload()
        elif isinstance(step, Schedule):
            for scheduler in self.schedulers:
                if scheduler is not None:
                    scheduler.step()
            for moment in moments:
                moment.lrs = [g["lr"] for o in self.optimizers for g in o.param_groups]

    def _train(self, step: Train, moments: list[Moment]) -> None:
        forwards = 2 if step.mode in ("two", "sum") else 1
        counts = [self.next_count() for _ in range(forwards)]
        self._hide()
        losses: list[list[torch.Tensor]] = [[] for _ in moments]
        for count in counts:
            if not step.no_sync:
                self._sync_buffers()
            for rank, moment in enumerate(moments):
                losses[rank].append(self._forward(rank, count))
                moment.losses.append(losses[rank][-1].item())
        for rank, (own, _) in enumerate(zip(losses, moments, strict=True)):
            if step.mode == "sum":
                (own[0] + own[1]).backward()
            elif step.mode == "twice":
                own[0].backward(retain_graph=True)
                own[0].backward()
            else:
                for loss in own:
                    loss.backward()
            self._collect(rank)
        if not step.no_sync:
            self._reduce()
            self._sync_buffers()
            grads = {n: None if g is None else g.clone() for n, g in self.mean.items()}
            for moment in moments:
                moment.grads = grads

    def _fail_in_backward(self) -> None:
        count = self.next_count()
        self._sync_buffers()
        for rank in range(self.world_size):
            self._forward(rank, count)
        self._zero_grad(ZeroGrad("wrapper", True))

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

    def _optimize(self, step: Step, moments: list[Moment]) -> None:
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
        for rank, moment in enumerate(moments):
            moment.params, moment.buffers = self._params(), self._buffers(rank)

    def _closure(self, count: int, moments: list[Moment]) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            self._hide()
            self._zero_grad(ZeroGrad("wrapper", True))
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

    def _clip(self, step: Clip, moments: list[Moment]) -> None:
        self._show()
        for optimizer in self.optimizers:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            norm = nn.utils.clip_grad_norm_(params, step.max_norm, step.norm_type).item()
            for moment in moments:
                moment.norms.append(norm)
        self._hide()

    def _add_late(self) -> None:
        self.add_late(self.models[0], self.optimizers)

    def _evaluate(self, step: Evaluate, moments: list[Moment]) -> None:
        count = self.next_count()
        self._sync_buffers()
        for rank, moment in enumerate(moments):
            if step.only_rank_0 and rank != 0:
                continue
            self.models[rank].eval()
            with torch.no_grad():
                moment.losses.append(self._forward(rank, count).item())
            self.models[rank].train()

    def _reload(self) -> None:
        checkpoint = self._checkpoint()
        states = [None if s is None else s.state_dict() for s in self.schedulers]
        self._build(checkpoint)
        for scheduler, state in zip(self.schedulers, states, strict=True):
            if scheduler is not None and state is not None:
                scheduler.load_state_dict(state)


def run_truth(program: Program, world_size: int, start: Checkpoint | None = None) -> list[RankRun]:
    """Each rank's course through ``program``, from one process."""
    return Truth(program, world_size, start).run()
