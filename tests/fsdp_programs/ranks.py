"""Runs a program on real ranks: this process is one of them.

The same interpreter drives fairscale and shardkit at fairscale's paths; only the class differs. It needs a process
group.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import ShardkitError
from tests.programs.models import Deliberate
from tests.programs.spec import Clip, Step, Train, ZeroGrad

from .course import Course
from .models import Model, Tree
from .result import Formats, Moment, Saved, Tensors
from .spec import (
    AnyStep,
    Evaluate,
    Fail,
    Inspect,
    Look,
    Path,
    Peek,
    Program,
    Reload,
    SetTrainable,
    Summon,
)
from .truth import backward, evaluation

Wrapper = Callable[..., nn.Module]


# how a parameter is reached for: given with the module that has it
PEEKS: dict[str, Callable[[torch.Tensor, nn.Module], Any]] = {
    "print": lambda p, m: repr(p),
    "sum": lambda p, m: p.sum().item(),
    "clone": lambda p, m: p.clone(),
    "lerp": lambda p, m: torch.zeros(p.shape, dtype=p.dtype).lerp_(p, 0.5),
    "numpy": lambda p, m: p.detach().numpy().sum(),
    "write": lambda p, m: p.mul_(1.0),
    "copy": lambda p, m: copy.deepcopy(m) if not list(m.children()) else None,
}


def wrapper_of(library: str) -> Wrapper:
    """What makes a unit: fairscale's class or the one at the same path in shardkit."""
    cls = importlib.import_module(f"{library}.nn.data_parallel").FullyShardedDataParallel
    # fairscale would look for a CUDA device
    device = {"compute_device": torch.device("cpu")} if library == "fairscale" else {}
    return lambda module, options: cls(module, **device, **options.arguments())


def wrapped(tree: Tree, program: Program, wrapper: Wrapper) -> tuple[Any, dict[Path, Any]]:
    """Makes units of a tree's nodes, innermost first; the root's wrapper and all wrappers by path."""
    by_path: dict[Path, Any] = {}
    for path, options in sorted(program.units(), key=lambda unit: -len(unit[0])):
        by_path[path] = tree.wrap(path, partial(wrapper, options=options))
    return by_path[()], by_path


def tensors(state: dict[str, Any]) -> Tensors:
    """Copies, without the attributes that libraries put on tensors."""
    return {n: torch.empty_like(t).copy_(t.detach()) for n, t in state.items()}


def plain(value: Any) -> Any:
    """The same with tuples for sizes."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


class Rank(Course):
    """This rank's course through a program."""

    def __init__(self, library: str, program: Program) -> None:
        super().__init__(program)
        self.library = library
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._frozen_later: list[SetTrainable] = []
        self._build()

    def _build(self) -> None:
        self.tree = Tree(self.program.model)
        self.model: Model = self.tree.modules[()]  # type: ignore[assignment]
        self.wrapper, self.units = wrapped(self.tree, self.program, wrapper_of(self.library))
        for step in self._frozen_later:
            self._freeze(step)
        self.optimizer = self.make_optimizer(self.wrapper.parameters())

    # ------------------------------------------------------------------ steps
    def run(self) -> list[Moment]:
        """What this rank saw at each step."""
        return [self.do(step) for step in self.program.steps]

    def do(self, step: AnyStep) -> Moment:
        """One step; what this rank saw."""
        moment = Moment(self.next_index(), type(step).__name__)
        if isinstance(step, Train):
            self._train(step, moment)
        elif isinstance(step, Evaluate):
            with evaluation(step, self.wrapper):
                moment.losses = [self._forward().item()]
        elif isinstance(step, Fail):
            self._fail(step)
        elif isinstance(step, ZeroGrad):
            (self.optimizer if step.target == "optimizer" else self.wrapper).zero_grad(
                set_to_none=step.set_to_none
            )
        elif isinstance(step, Clip):
            moment.norms = [float(self.wrapper.clip_grad_norm_(step.max_norm, step.norm_type))]
        elif isinstance(step, Step):
            self.optimizer.step(self._closure if step.closure else None)
        elif isinstance(step, Peek):
            self._peek(step)
        elif isinstance(step, SetTrainable):
            self._freeze(step)
            self._frozen_later.append(step)
        elif isinstance(step, Summon):
            self._summon(step, moment)
        elif isinstance(step, Reload):
            self._reload(step)
        elif isinstance(step, Inspect):
            moment.formats = self._formats(step)
        if isinstance(step, (Look, Reload)):
            moment.state = tensors(self.wrapper.state_dict())
        return moment

    def _forward(self) -> torch.Tensor:
        return self.loss(self.wrapper, self.next_count(), self.rank)

    def _train(self, step: Train, moment: Moment) -> None:
        with self.wrapper.no_sync() if step.no_sync else nullcontext():
            losses = [self._forward() for _ in range(2 if step.mode in ("two", "sum") else 1)]
            backward(step, losses)
        moment.losses = [loss.item() for loss in losses]

    def _closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._forward()
        loss.backward()
        return loss

    @torch.no_grad()
    def _peek(self, step: Peek) -> None:
        for module, names in self.tree.attributes.items():
            for name in names:
                param = getattr(module, name)
                with suppress(ShardkitError):
                    value = PEEKS[step.how](param, module)
                    if torch.is_tensor(value) and value.shape != param.shape:
                        raise AssertionError(f"{step.how} of {name} gave {tuple(value.shape)}")

    def _fail(self, step: Fail) -> None:
        if step.where == "no_sync":
            try:
                with self.wrapper.no_sync():
                    raise Deliberate
            except Deliberate:
                return
        self.model.fail = step.where
        try:
            self._forward().backward()
        except Deliberate:
            pass
        finally:
            self.model.fail = ""
        self.wrapper.zero_grad(set_to_none=True)

    def _freeze(self, step: SetTrainable) -> None:
        # a wrapper lists its own parameters, not those that it shares with another one
        shared = "shared" in self.program.model.kinds
        if step.names == "all" and step.path in self.units and not shared:
            self.units[step.path].requires_grad_(step.trainable)
        else:
            self.tree.set_trainable(step.path, step.names, step.trainable)

    def _summon(self, step: Summon, moment: Moment) -> None:
        with self.wrapper.summon_full_params(volatile=step.volatile):
            moment.summoned = tensors(dict(self.wrapper.named_parameters()))
            if step.write:
                with torch.no_grad():
                    for p in self.wrapper.parameters():
                        p.add_(0.01)

    # ------------------------------------------------------------------ saving and loading
    def _broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def _local(self) -> list[tuple[Tensors, dict[str, Any]]]:
        """Each rank's local state dict and metadata, on all ranks."""
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(
            parts, (tensors(self.wrapper.local_state_dict()), self.wrapper.local_metadata_dict())
        )
        return parts

    def _full(self) -> Tensors:
        full = tensors(self.wrapper.state_dict())
        return self._broadcast(full) if self.program.options.state_dict_on_rank_0_only else full

    def save(self) -> Saved:
        """Everything, on all ranks."""
        optimizer = copy.deepcopy(self.wrapper.gather_full_optim_state_dict(self.optimizer))
        return Saved(self._full(), self._local(), self._broadcast(optimizer), self.count)

    def load(self, saved: Saved, form: str) -> None:
        """Goes on with what some run saved."""
        self._load_model(form, saved.full if form == "full" else saved.local)
        self._load_optimizer(saved.optimizer)
        self.count = saved.count

    def _load_model(self, form: str, saved: Any) -> None:
        if form == "local":
            self.wrapper.load_local_state_dict(saved[self.rank][0])
        elif form == "consolidated":
            weights, metadata = [s[0] for s in saved], [s[1] for s in saved]
            self.wrapper.load_state_dict(type(self.wrapper).consolidate_shard_weights(weights, metadata))
        else:
            self.wrapper.load_state_dict(saved)

    def _load_optimizer(self, full: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(self.wrapper.get_shard_from_optim_state_dict(copy.deepcopy(full)))

    def _reload(self, step: Reload) -> None:
        model = self._full() if step.form == "full" else self._local()
        if step.optimizer == "full":
            state = self._broadcast(self.wrapper.gather_full_optim_state_dict(self.optimizer))
        else:
            state = self.optimizer.state_dict()
        model, state = pickle.loads(pickle.dumps((model, state)))
        self._build()
        self._load_model(step.form, model)
        if step.optimizer == "full":
            self._load_optimizer(state)
        else:
            self.optimizer.load_state_dict(state)

    def _formats(self, step: Inspect) -> Formats:
        return Formats(
            [(n, tuple(p.shape)) for n, p in self.wrapper.named_parameters()],
            tensors(self.wrapper.local_state_dict()),
            plain(self.wrapper.local_metadata_dict()),
            copy.deepcopy(self.wrapper.gather_full_optim_state_dict(self.optimizer))
            if step.optimizer
            else {},
        )


def run_rank(rank: int, library: str, program: Program) -> bytes:
    """What this rank saw, pickled: tensors in a queue between processes would travel as file descriptors."""
    return pickle.dumps(Rank(library, program).run())


def save_rank(rank: int, library: str, program: Program) -> bytes:
    """Runs a program; what it leaves, pickled."""
    course = Rank(library, program)
    course.run()
    return pickle.dumps(course.save())


def resume_rank(rank: int, library: str, program: Program, saved: bytes, form: str) -> bytes:
    """Runs a program that goes on from what :func:`save_rank` left."""
    course = Rank(library, program)
    course.load(pickle.loads(saved), form)
    return pickle.dumps(course.run())


_kept: dict[str, Rank] = {}


def keep_rank(rank: int, library: str, program: Program) -> None:
    """Builds a program's model in this rank and keeps it for :func:`move_rank`."""
    _kept[library] = Rank(library, program)


def move_rank(rank: int, library: str, step: AnyStep) -> bytes:
    """One more step of the model that :func:`keep_rank` built."""
    return pickle.dumps(_kept[library].do(step))
