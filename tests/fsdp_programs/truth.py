"""Runs a program in one process with plain torch: the truth that sharded runs are compared with.

All ranks' models share their parameters and have buffers of their own, as ranks have that FullyShardedDataParallel
wraps. A gradient is the mean over ranks; a parameter that no rank used has none. In mixed precision, each forward casts
the parameters once, and the cast's own derivative brings the gradient back to full precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.programs.models import Deliberate
from tests.programs.spec import Clip, Step, Train, ZeroGrad

from .course import Course
from .models import Tree
from .result import Moment, Tensors
from .spec import AnyStep, Evaluate, Fail, Look, Program, Reload, SetTrainable, Summon

Grads = dict[str, torch.Tensor | None]


class Truth(Course):
    """The course of a program over W simulated ranks."""

    def __init__(self, program: Program, world_size: int) -> None:
        super().__init__(program)
        self.world_size = world_size
        tree = Tree(program.model)
        self.named = dict(tree.model.named_parameters())
        shared = {id(p): p for p in self.named.values()}
        self.trees = [copy.deepcopy(tree, dict(shared)) for _ in range(world_size)]
        self.low = program.options.low_dtype
        self._cast_buffers()
        self.optimizer = self.make_optimizer(self.named.values())
        self.mean: Grads = dict.fromkeys(self.named)
        self.local: list[Grads] = [dict.fromkeys(self.named) for _ in range(world_size)]

    # ------------------------------------------------------------------ forward
    def _cast_buffers(self) -> None:
        if self.low is None:
            return
        dtype = getattr(torch, self.program.options.buffer_dtype, self.low)
        for tree in self.trees:
            for module in tree.model.modules():
                for name, b in module.named_buffers(recurse=False):
                    setattr(module, name, b.to(dtype) if b.is_floating_point() else b)

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
                mean = self.mean[name]
                if mean is None:  # with the strides of the parameter: fused optimizers walk memory
                    mean = self.mean[name] = torch.zeros_like(p)
                mean += torch.stack(present).sum(0) / self.world_size
        self.local = [dict.fromkeys(self.named) for _ in self.local]

    def _show(self) -> None:
        for name, p in self.named.items():
            p.grad = self.mean[name]

    def _hide(self) -> None:
        for p in self.named.values():
            p.grad = None

    # ------------------------------------------------------------------ steps
    def run(self) -> list[list[Moment]]:
        """What each rank saw."""
        steps = [self.do(step) for step in self.program.steps]
        return [[moments[rank] for moments in steps] for rank in range(self.world_size)]

    def go_on_from(self, other: Truth, own_buffers: bool) -> None:
        """Takes over values, optimizer state and counters of a run with maybe another number of ranks.

        Args:
            own_buffers: each rank gets the buffers of the same rank, not those of rank 0.
        """
        for rank, tree in enumerate(self.trees):
            tree.model.load_state_dict(other.trees[rank if own_buffers else 0].model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.count = other.count

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
            self._zero_grad(step.set_to_none)
        elif isinstance(step, Clip):
            self._clip(step, moments)
        elif isinstance(step, Step):
            self._step(step)
        elif isinstance(step, SetTrainable):
            self.trees[0].set_trainable(step.path, step.names, step.trainable)
        elif isinstance(step, Reload):
            self._reload(step)
        elif isinstance(step, Summon):
            self._summon(step, moments)
        if isinstance(step, (Look, Reload)):
            for rank, moment in enumerate(moments):
                moment.state = self._state(rank)
        return moments

    def _train(self, step: Train, moments: list[Moment]) -> None:
        counts = [self.next_count() for _ in range(2 if step.mode in ("two", "sum") else 1)]
        for rank, moment in enumerate(moments):
            losses = [self._forward(rank, count) for count in counts]
            backward(step, losses)
            self._collect(rank)
            moment.losses = [loss.item() for loss in losses]
        if not step.no_sync:
            self._reduce()

    def _step(self, step: Step) -> None:
        if not step.closure:
            self._show()
            self.optimizer.step()
            self._hide()
            return

        def closure() -> torch.Tensor:
            self._hide()
            self._zero_grad(set_to_none=True)
            count, losses = self.next_count(), []
            for rank in range(self.world_size):
                losses.append(self._forward(rank, count))
                losses[-1].backward()
                self._collect(rank)
            self._reduce()
            self._show()
            return torch.stack(losses).mean()

        self.optimizer.step(closure)
        self._hide()

    def _evaluate(self, step: Evaluate, moments: list[Moment]) -> None:
        count = self.next_count()
        for rank, moment in enumerate(moments):
            model = self.trees[rank].model
            with evaluation(step, model):
                moment.losses = [self._forward(rank, count).item()]

    def _fail(self, step: Fail) -> None:
        if step.where == "no_sync":
            return
        count = self.next_count()
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
        self._zero_grad(set_to_none=True)

    def _zero_grad(self, set_to_none: bool) -> None:
        for grads in [self.mean, *self.local]:
            for name, held in grads.items():
                if held is not None:
                    grads[name] = None if set_to_none else torch.zeros_like(held)

    def _clip(self, step: Clip, moments: list[Moment]) -> None:
        self._show()
        norm = nn.utils.clip_grad_norm_(self.named.values(), step.max_norm, step.norm_type).item()
        self._hide()
        for moment in moments:
            moment.norms = [norm]

    def _summon(self, step: Summon, moments: list[Moment]) -> None:
        for moment in moments:
            moment.summoned = {n: p.detach().clone() for n, p in self.named.items()}
        if step.write:
            with torch.no_grad():
                for p in self.named.values():
                    p.add_(0.01)

    def _reload(self, step: Reload) -> None:
        """Only gradients are lost, and where one rank's state is all ranks', the other ranks' buffers."""
        self._zero_grad(set_to_none=True)
        options = self.program.options
        if step.form == "consolidated" or (step.form == "full" and options.state_dict_on_rank_0_only):
            source = dict(self.trees[0].model.named_buffers())
            for tree in self.trees[1:]:
                for name, b in tree.model.named_buffers():
                    b.data.copy_(source[name])

    def _state(self, rank: int) -> Tensors:
        if rank != 0 and self.program.options.state_dict_on_rank_0_only:
            return {}
        full = self.trees[rank].model.state_dict()
        wide = self.low is not None
        return {
            n: t.detach().to(torch.float32 if wide and t.is_floating_point() else t.dtype, copy=True)
            for n, t in full.items()
        }


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


def run_truth(program: Program, world_size: int) -> list[list[Moment]]:
    """What each rank sees in ``program``, from one process."""
    return Truth(program, world_size).run()
