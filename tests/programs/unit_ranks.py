"""A rank of FullyShardedDataParallel: modules are units, and parameters have values only while they are gathered."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardkit.errors import ShardkitError
from shardkit.layout import AlignedLayout, EachAlone

from .models import Tree
from .ranks import Rank, tensors
from .result import Formats, Moment, Saved, Tensors
from .spec import AnyStep, Clip, Inspect, Look, Path, Peek, Program, Reload, SetTrainable, Summon, Unit

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


def wrapper_of(library: str) -> Callable[..., nn.Module]:
    """What makes a unit: fairscale's class or the one at the same path in shardkit."""
    cls = importlib.import_module(f"{library}.nn.data_parallel").FullyShardedDataParallel
    # fairscale would look for a CUDA device
    device = {"compute_device": torch.device("cpu")} if library == "fairscale" else {}

    def wrap(module: nn.Module, options: Unit) -> nn.Module:
        arguments = options.arguments()
        align = arguments.pop("align", None)
        kind = cls if align is None else partial(_aligned(cls), align)
        return kind(module, **device, **arguments)

    return wrap


def _aligned(cls: Any) -> Any:
    """The class with the core's ``align``, which fairscale's arguments lack."""

    class Aligned(cls):
        def __init__(self, align: Any, module: nn.Module, **arguments: Any) -> None:
            self.__dict__["align"] = align
            super().__init__(module, **arguments)

        def _shard(self, module: nn.Module, options: Any) -> None:
            layout = AlignedLayout(self.align)
            super()._shard(module, replace(options, layout=layout if options.flatten else EachAlone(layout)))

    return Aligned


def plain(value: Any) -> Any:
    """The same with tuples for sizes."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


class UnitRank(Rank):
    """See :class:`.ranks.Rank`.

    Attributes:
        units: wrappers by path.
    """

    def __init__(self, library: str, program: Program) -> None:
        super().__init__(library, program)
        self._build()

    def _build(self) -> None:
        self.tree = Tree(self.program.model)
        self.units: dict[Path, Any] = {}
        make = wrapper_of(self.library)
        for path, options in sorted(self.program.units(), key=lambda unit: -len(unit[0])):  # innermost first
            self.units[path] = self.tree.wrap(path, partial(make, options=options))
        self.wrapper = self.units[()]
        for step in self.frozen_later:
            self.freeze(step)
        self.make_optimizers(
            dict(self.wrapper.named_parameters()), lambda cls, params, arguments: cls(params, **arguments)
        )

    # ------------------------------------------------------------------ steps
    def look(self, step: AnyStep, moment: Moment) -> None:
        if isinstance(step, Peek):
            self._peek(step)
        elif isinstance(step, Summon):
            self._summon(step, moment)
        elif isinstance(step, Inspect):
            moment.formats = self._formats(step)
        elif isinstance(step, (Look, Reload)):
            moment.state = tensors(self.wrapper.state_dict())

    def clip(self, step: Clip) -> list[float]:
        return [float(self.wrapper.clip_grad_norm_(step.max_norm, step.norm_type))]

    def freeze(self, step: SetTrainable) -> None:
        # a wrapper lists its own parameters, not those that it shares with another one
        shared = "shared" in self.program.model.kinds
        if step.names == "all" and step.path in self.units and not shared:
            self.units[step.path].requires_grad_(step.trainable)
        else:
            super().freeze(step)

    @torch.no_grad()
    def _peek(self, step: Peek) -> None:
        for module, names in self.tree.attributes.items():
            for name in names:
                param = getattr(module, name)
                with suppress(ShardkitError):
                    value = PEEKS[step.how](param, module)
                    if torch.is_tensor(value) and value.shape != param.shape:
                        raise AssertionError(f"{step.how} of {name} gave {tuple(value.shape)}")

    def _summon(self, step: Summon, moment: Moment) -> None:
        with self.wrapper.summon_full_params(volatile=step.volatile):
            moment.summoned = tensors(dict(self.wrapper.named_parameters()))
            if step.write:
                with torch.no_grad():
                    for p in self.wrapper.parameters():
                        p.add_(0.01)

    # ------------------------------------------------------------------ saving and loading
    def _local(self) -> list[tuple[Tensors, dict[str, Any]]]:
        """Each rank's local state dict and metadata, on all ranks."""
        return self.world.gather(
            (tensors(self.wrapper.local_state_dict()), self.wrapper.local_metadata_dict())
        )

    def _full(self) -> Tensors:
        full, options = tensors(self.wrapper.state_dict()), self.program.options
        on_rank_0 = isinstance(options, Unit) and options.state_dict_on_rank_0_only
        return self.world.broadcast(full) if on_rank_0 else full

    def _gathered(self) -> dict[str, Any] | None:
        return self.wrapper.gather_full_optim_state_dict(self.optimizers[0])

    def save(self) -> Saved:
        """Everything, on all ranks."""
        optimizer = self.world.broadcast(copy.deepcopy(self._gathered()))
        return Saved(self._full(), self._local(), optimizer, self.count)

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
        part = self.wrapper.get_shard_from_optim_state_dict(copy.deepcopy(full))
        self.optimizers[0].load_state_dict(part)

    def reload(self, step: Reload) -> None:
        model = self._full() if step.form == "full" else self._local()
        whole = step.optimizer == "full"
        state = self.world.broadcast(self._gathered()) if whole else self.optimizers[0].state_dict()
        model, state = pickle.loads(pickle.dumps((model, state)))
        self._build()
        self._load_model(step.form, model)
        if whole:
            self._load_optimizer(state)
        else:
            self.optimizers[0].load_state_dict(state)

    def _formats(self, step: Inspect) -> Formats:
        return Formats(
            [(n, tuple(p.shape)) for n, p in self.wrapper.named_parameters()],
            tensors(self.wrapper.local_state_dict()),
            plain(self.wrapper.local_metadata_dict()),
            copy.deepcopy(self._gathered()) if step.optimizer else {},  # type: ignore[arg-type]
        )
