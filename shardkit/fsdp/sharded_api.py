"""Answers at every door alike: full parameters, clipping, accumulation, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Group
from ..errors import ConfigurationError, LifecycleError
from ..optimizer_state.forms import gather_by_id, shard_by_id
from ..optimizer_state.marking import mark_shards
from ..optimizers.shards import refuse_stand_ins
from ..progress import noting_errors
from ..reduction.ordered import refuse_local
from ..reduction.shard_gradients import Portion, clip_by_global_norm, norm_like
from ..types import IncompatibleKeys, SavedState, StateDict
from .construct import wake
from .engine import Engine
from .export import Change, Names, SentWeights, export
from .flat_param import FlatParam
from .forward import become_root
from .originals import mesh_of
from .state import ShardingState, state_of, summoned
from .state_dict import (
    check_own,
    consolidate,
    loading,
    local_state,
    mark,
    metadata,
    sharded_state_dict,
    slot_of,
)


def clip(root: ShardingState, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales the gradients below a root; returns their norm over all ranks.

    Raises:
        ConfigurationError: ``norm_type`` is 0.
        LifecycleError: inside of ``step_in_backward``.
    """
    if norm_type == 0:
        raise ConfigurationError(
            "norm_type=0 counts parameters whose gradients are not zero, and shards are no parameters; "
            "clip_grad_norm_ takes any other number, inf and -inf"
        )
    flats = root.all_flats()
    if any(f.store.landing is not None and f.store.landing.then is not None for f in flats):
        raise LifecycleError(
            "clip_grad_norm_ inside of step_in_backward: nothing is left to clip; call step() after backward"
        )
    sharded = {listing.param for flat in flats for listing in flat.listings}
    rest = [p for p in root.door.parameters() if p not in sharded]
    everything = [f.param for f in flats] + rest
    if not everything:
        return torch.zeros(())
    by_groups: dict[tuple[tuple[int, ...], ...], Portion] = {}
    gradients = [p.grad for p in rest if p.grad is not None]
    alike = gradients.copy()
    for flat in flats:
        # this rank's, without padding that nobody lists or clears
        if flat.shards is not None:
            own = flat.shards.local_gradients()
        else:
            own = [] if flat.param.grad is None else [flat.param.grad]
        gradients += own
        groups = _spread_over(flat)
        portion = by_groups.setdefault(tuple(g.ranks for g in groups), Portion([], groups))
        portion.gradients.extend(_that_count(flat, own, norm_type))
    portions = [*by_groups.values()]
    if alike:
        portions.append(Portion(alike, ()))
    in_order = root.options.reduce.order is not None
    like = _like(root, everything)
    return clip_by_global_norm(portions, gradients, like, max_norm, norm_type, in_order=in_order)


def _spread_over(flat: FlatParam) -> tuple[Group, ...]:
    """The ranks that it is divided over, then those of each dimension of the mesh that tensor parallelism cuts over."""
    mesh = mesh_of(flat.originals)
    dims = () if mesh is None else range(mesh.ndim)
    return flat.group, *(flat.group.backend.group(mesh.get_group(dim)) for dim in dims if mesh is not None)


def _like(root: ShardingState, params: Sequence[torch.Tensor]) -> torch.Tensor:
    like = norm_like(params)
    on_host = like.device.type == "cpu" and not root.options.offload.on_host
    return like.to(root.group.backend.device()) if on_host else like


def _that_count(flat: FlatParam, gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Chooses those of them that the norm is of; for norms that zeros change, without padding and what is unused."""
    if flat.shards is not None and flat.shards.has_copies:
        return flat.shards.local_gradients(padded=norm_type > 0, copies=False)
    if norm_type > 0 or not gradients:
        return gradients
    if flat.shards is not None:
        return flat.shards.local_gradients(padded=False)
    (gradient,) = gradients
    if flat.unused.used is not None:
        return [torch.where(flat.unused.used, gradient, torch.full_like(gradient, math.inf))]
    rank, unused = flat.group.rank, flat.unused.originals
    here = [p for p in flat.layout.pieces() if p.rank == rank and not unused[p.item]]
    return [gradient.view(-1)[p.offset : p.offset + p.numel] for p in here]


class ShardedAPI:
    """Has the methods of a sharded module, which work on its state. Beside one that was sharded in place, it is all."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state

    def _root_engine(self, what: str) -> Engine:
        state = self._state
        engine = state.engine or become_root(state)
        if not state.is_root:
            raise LifecycleError(f"{what} is for the outermost FSDP module; call it there")
        return engine

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates this rank's gradients; the next backward outside reduces them too.

        Costs memory for full gradients on every rank.

        Raises:
            LifecycleError: called on a unit below the root.
        """
        engine = self._root_engine("no_sync")
        refuse_local(self._state.options.reduce)
        before = engine.set_accumulating([True] * len(engine.units))
        try:
            yield
        finally:
            engine.set_accumulating(before)

    @contextlib.contextmanager
    def summon_full_params(self, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Inside, the module's own parameters are there under their own names, full and in full precision (collective).

        Forward inside runs on this rank alone, with the parameters that are summoned: evaluation or ``generate`` on one
        rank needs no other. Backward inside is refused.

        Args:
            recurse: those of units below too.
            writeback: changes to them are kept. Ranks must make the same changes.

        Raises:
            LifecycleError: inside of forward or backward, of this or another thread.
        """
        with summoned(self._state, recurse, writeback):
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm`` (collective).

        Returns:
            The norm before, 0-dim.

        Raises:
            LifecycleError: called on a unit below the root, or inside of ``step_in_backward``.
        """
        self._root_engine("clip_grad_norm_").check_idle("clip_grad_norm_")
        return clip(self._state, float(max_norm), float(norm_type))

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters (shards) of this module and below that have a gradient."""
        return [p for p in self._state.door.parameters() if p.grad is not None]

    def reshard_frozen(self) -> None:
        """Gives back what ``ReshardPolicy(frozen="keep")`` keeps; the next forward gathers it again.

        Raises:
            LifecycleError: inside of forward or backward, or on a unit below the root.
        """
        self._root_engine("reshard_frozen").check_idle("reshard_frozen")
        for state in self._state.states():
            state.unit.give_back_frozen()

    def set_divisors(self, before: float, after: float) -> None:
        """Gradients are divided by the one before and by the other after their sum over ranks."""
        self._state.unit.divide(before, after)

    # ------------------------------------------------------------ checkpoints of shards
    def local_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        """Returns this rank's shards, 1-D and padded, under fairscale's names; loads at the same world size only."""
        state = self._state
        with local_state(state):
            found = self._door_state_dict(*args, **kwargs)
        mark(state, found)
        if state.group.world_size > 1:
            mark_shards(state.door.parameters(), found)
        return found

    @noting_errors
    def load_local_state_dict(self, state_dict: SavedState, strict: bool = True) -> IncompatibleKeys:
        """Loads what :meth:`local_state_dict` returned on this rank (collective).

        Raises:
            ConfigurationError: on all ranks, if it is another rank's, world size's or model's; nothing is loaded.
        """
        if "flat_param" in state_dict and "flat_param_0" not in state_dict:  # its name in old checkpoints
            state_dict = {"flat_param_0" if k == "flat_param" else k: v for k, v in state_dict.items()}
        state = self._state
        check_own(state, state_dict)
        with local_state(state), loading(state.door):
            return self._load_door(state_dict, strict)

    # Of a door that is a class, state dicts of its own: those of subclasses may have called this.
    def _door_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        return self._state.door.state_dict(*args, **kwargs)

    def _load_door(self, state_dict: SavedState, strict: bool = True) -> IncompatibleKeys:
        return self._state.door.load_state_dict(state_dict, strict)

    def sharded_state_dict(self) -> StateDict:
        """Parameters and buffers under the model's names, for ``torch.distributed.checkpoint``; nothing is gathered.

        ::

            state = {"model": model.sharded_state_dict()}
            dcp.save(state, checkpoint_id=folder)     # each rank writes its part
            dcp.load(state, checkpoint_id=folder)     # the model has the values then

        Files are those of the whole model: any number of ranks loads them, FSDP2, and one process. Of what is sharded
        the values stand for this rank's part of a parameter, and share its memory.
        """
        return sharded_state_dict(self._state)

    def export(
        self,
        names: Names = None,
        dtype: torch.dtype | None = None,
        *,
        on: int | None = None,
        since: SentWeights | None = None,
    ) -> Iterator[tuple[str, torch.Tensor | Change]]:
        """Yields full weights under their names, one unit at a time (collective: all ranks iterate to the end).

        ::

            for name, weights in sharding_of(model).export(dtype=torch.bfloat16, on=0):   # empty on other ranks
                engine.update(name, weights)

        No more than a unit's values are there at a time, unless they are kept. Order and number are the same each time;
        a tied weight comes under each of its names.

        Args:
            names: "hf": those, and the shapes, that ``save_pretrained`` of a transformers model writes, tied weights
                once. Or a function from the model's names to the receiver's, None for what is not sent.
            dtype: of floating-point parameters; buffers keep theirs.
            on: the rank, of those that share a parameter, that gets them; None: all do.
            since: what was sent before, which is noted in it. Instead of a parameter's values there is a
                :class:`~shardkit.Change` then, with what is new in it to the bit: ``change.apply(tensor)`` at the
                receiver. The first one is all of it. Buffers are sent as they are. What packed weights stand for
                comes whole, once, and again after they were loaded or written to.

        Raises:
            ConfigurationError: tensor parallelism has cut parameters; there are no values yet (meta device); ``"hf"``
                of another model, or of one with adapters.
        """
        return export(self._state, names, dtype, on, since)

    def local_metadata_dict(self) -> StateDict:
        """Returns what :meth:`consolidate_shard_weights` needs to know of this rank's shards."""
        return metadata(self._state)

    consolidate_shard_weights = staticmethod(consolidate)

    @noting_errors
    def gather_full_optim_state_dict(self, optim: Optimizer, **ignored: object) -> StateDict | None:
        """Returns the optimizer's full state on rank 0, None on others (collective), by id; see ``optimizer_state``."""
        refuse_stand_ins(optim, "gather_full_optim_state_dict")
        own = self._state
        _refuse_dtensors(own, "gather_full_optim_state_dict", "get_optimizer_state_dict")
        uncollected = [f for s in own.states() if s.options.keeps_optimizer_state for f in s.listings]
        state = optim.state_dict()
        index = {id(p): i for i, p in enumerate(p for g in optim.param_groups for p in g["params"])}
        own.uncollected = {
            index[id(f.param)]: copy.deepcopy(state["state"].get(index[id(f.param)], {}))
            for f in uncollected
            if id(f.param) in index
        }
        is_first = own.group.rank == 0 and (own.replicas is None or own.replicas.rank == 0)
        slots, stay = [slot_of(f) for f in own.all_listings()], {id(f.param) for f in uncollected}
        return gather_by_id(slots, stay, state, optim, is_first)

    @noting_errors
    def get_shard_from_optim_state_dict(self, full_optim_state_dict: StateDict) -> StateDict:
        """Returns this rank's part of a full optimizer state, for ``optimizer.load_state_dict``.

        Raises:
            ConfigurationError: it belongs to another model.
        """
        _refuse_dtensors(self._state, "get_shard_from_optim_state_dict", "set_optimizer_state_dict")
        slots = [slot_of(f) for f in self._state.all_listings()]
        shard = shard_by_id(slots, full_optim_state_dict, list(self._state.door.parameters()))
        uncollected = self._state.uncollected
        for local in full_optim_state_dict.get("uncollected_local_ids", []):
            if local in uncollected:
                shard["state"][local] = uncollected[local]
        return shard


def _refuse_dtensors(state: ShardingState, method: str, instead: str) -> None:
    if any(s.options.dtensors for s in state.states()):
        raise ConfigurationError(
            f"{method} is for shards, and this model's are listed as DTensors, whose optimizer state torch can gather: "
            f"use torch.distributed.checkpoint.state_dict.{instead}, or fully_shard without dtensors=True"
        )


def sharding_of(module: nn.Module) -> ShardedAPI:
    """The methods of a module that FSDP has sharded: the module itself if it is a wrapper, else an object with them.

    Raises:
        ConfigurationError: it is not sharded, or a part of what is.
    """
    state = state_of(module)
    if state is None:
        raise ConfigurationError(
            f"this {type(module).__name__} is not sharded by itself; call fully_shard(module) or FSDP(module) first, "
            "or pass the module that was given to them"
        )
    wake(state)
    return module if isinstance(module, ShardedAPI) else ShardedAPI(state)
