"""Answers at every door alike: full parameters, clipping, accumulation, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..checks import facts_of_all, objects_of
from ..errors import ConfigurationError, LifecycleError, RankFailedError, noting_errors
from ..optimizer_state.forms import NOTE, gather_by_id, mark_shards, shard_by_id
from ..optimizers.shards import refuse_stand_ins
from ..reduction.compression import Run, difference, mixed_sum
from ..reduction.ordered import refuse_local
from ..reduction.shard_gradients import Portion, clip_by_global_norm, norm_like
from ..torch_seams.tensors import INTEGERS, copied, memory_of
from ..types import IncompatibleKeys, SavedState, StateDict, T, Tree
from .construct import wake
from .engine import Engine
from .flat_param import SUMMONED, FlatParam
from .forward import become_root
from .originals import mesh_of
from .own_forms import is_in_parts
from .state import ShardingState, state_of, summoned
from .state_dict import (
    buffers_of,
    check_own,
    check_saved,
    consolidate,
    loading,
    local_state,
    mark,
    metadata,
    name_at,
    sharded_state_dict,
    slot_of,
    written_parameters,
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
        # the ranks that it is divided over, then those of each dimension that tensor parallelism cuts over
        groups, mesh = [flat.group], mesh_of(flat.originals)
        if mesh is not None:
            groups += [flat.group.backend.group(mesh.get_group(dim)) for dim in range(mesh.ndim)]
        portion = by_groups.setdefault(tuple(g.ranks for g in groups), Portion([], groups))
        portion.gradients.extend(_that_count(flat, own, norm_type))
    portions = [*by_groups.values()]
    if alike:
        portions.append(Portion(alike, ()))
    in_order = root.options.reduce.order is not None
    like = norm_like(everything)
    if like.device.type == "cpu" and not root.options.offload.on_host:
        like = like.to(root.group.backend.device())
    return clip_by_global_norm(portions, gradients, like, max_norm, norm_type, in_order=in_order)


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
    here = [p for p in flat.layout.of_rank(rank).values() if not unused[p.item]]
    return [gradient.view(-1)[p.offset : p.offset + p.numel] for p in here]


class ShardedAPI:
    """Has the methods of a sharded module, which work on its state. Beside one that was sharded in place, it is all."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state

    def _root_engine(self, what: str) -> Engine:
        state = self._state
        engine = state.engine or become_root(state)
        if not state.is_root:
            raise LifecycleError(f"{what} should only be called on the root FSDP instance, the outermost")
        return engine

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backwards inside only accumulate this rank's gradients; the next backward outside reduces them too.

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
        """Shows the module's own parameters inside, under their own names, full and in full precision (collective).

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
        with local_state(state.states()):
            found = self._door_state_dict(*args, **kwargs)
        mark(state, found, str(args[1] if len(args) > 1 else kwargs.get("prefix", "")))
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
        with local_state(state.states()), loading(state.door):
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
        to: Callable[[str, Any], object] | None = None,
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
            to: gets each name and its weights, and all of them before this returns; nothing is yielded then.

        Raises:
            RankFailedError: ``to`` (or ``names``) raised on another rank, which raises its own error.
            ConfigurationError: tensor parallelism has cut parameters; there are no values yet (meta device); ``"hf"``
                of another model, or of one with adapters.
        """
        _check_export(self._state, dtype, on, since)
        units = _exported(self._state, _Renaming(self._state.door, names), dtype, on, since)
        if to is None:
            return chain.from_iterable(units)
        for unit in units:
            with raising_together(self, "export()"):
                for name, value in unit:
                    to(name, value)
        return iter(())

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
        places = [index[id(f.param)] for f in uncollected if id(f.param) in index]
        own.uncollected = {i: copy.deepcopy(state["state"].get(i, {})) for i in places}
        is_first = own.group.rank == 0 and (own.replicas is None or own.replicas.rank == 0)
        slots, stay = [slot_of(f) for f in own.all_listings()], {id(f.param) for f in uncollected}
        if full := gather_by_id(slots, stay, state, optim, is_first):  # ids depend on what was a unit
            full._metadata = {NOTE: self._names()[0]}  # type: ignore[attr-defined]
        return full

    def _names(self) -> tuple[list[str], list[str]]:
        """Returns names of parameters, by id and in the order in which the model was written."""
        places: dict[Tree, str] = {}
        for name, _, flat, number in written_parameters(self._state.door):
            if flat:
                places.setdefault((flat, number), name)
        listed = [(f.flat, f.first + k) for f in self._state.all_listings() for k in range(len(f.originals))]
        return [places[place] for place in listed], [*places.values()]

    @noting_errors
    def get_shard_from_optim_state_dict(self, full_optim_state_dict: StateDict) -> StateDict:
        """Returns this rank's part of a full optimizer state, for ``optimizer.load_state_dict``.

        Raises:
            ConfigurationError: it belongs to another model.
        """
        _refuse_dtensors(self._state, "get_shard_from_optim_state_dict", "set_optimizer_state_dict")
        slots, listed = [slot_of(f) for f in self._state.all_listings()], list(self._state.door.parameters())
        shard = shard_by_id(slots, full_optim_state_dict, listed, *self._names())
        own, ids = self._state.uncollected, full_optim_state_dict.get("uncollected_local_ids", ())
        shard["state"].update((i, own[i]) for i in ids if i in own)
        return shard


def _refuse_dtensors(state: ShardingState, method: str, instead: str) -> None:
    if any(s.options.dtensors for s in state.states()):
        raise ConfigurationError(
            f"{method} is for shards, and this model's are listed as DTensors, whose optimizer state torch can gather: "
            f"use torch.distributed.checkpoint.state_dict.{instead}, or fully_shard without dtensors=True"
        )


def sharding_of(module: nn.Module) -> ShardedAPI:
    """Returns what has the methods of a sharded module: the module itself if it is a wrapper, else an object with them.

    Raises:
        ConfigurationError: it is not sharded, or a part of what is.
    """
    if (state := state_of(module)) is None:
        raise ConfigurationError(
            f"this {type(module).__name__} is not sharded by itself; call fully_shard(module) or FSDP(module) first, "
            "or pass the module that was given to them"
        )
    wake(state)
    return module if isinstance(module, ShardedAPI) else ShardedAPI(state)


# ------------------------------------------------------------ weights that leave the model
# For an inference engine or a file: whole, or what has changed since the last time.
#
# Each rank compares its shard, as it would be sent, with the one that was sent before, and sends what differs, see
# ``reduction/compression.py``. A checksum of the whole tensor, which ranks make of shards, tells a receiver that it has
# what the trainer has.

Names = Callable[[str], str | None] | Literal["hf"] | None


@dataclass(frozen=True)
class Change:
    """Holds what is new in one tensor. It can be pickled.

    Attributes:
        runs: in any order.
        checksum: of the whole tensor afterwards, see :func:`checksum`.
    """

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Run, ...]
    checksum: int

    @property
    def nbytes(self) -> int:
        """Counts the bytes of values and positions."""
        return sum(r.values.nbytes + (0 if r.gaps is None else r.gaps.nbytes) for r in self.runs)

    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns places in the flattened tensor [n], and the values there [n]: a patch, as inference engines take it.

        Each place comes once, a few with the value that they had. They are of int32, in larger tensors of int64.
        """
        runs = self.runs or (Run(0, None, torch.empty(0, dtype=self.dtype)),)
        kind = torch.int32 if self.shape.numel() <= 2**31 else torch.int64
        places = torch.cat([run.places(run.values.device) for run in runs])
        return places.to(kind), torch.cat([run.values for run in runs])

    @torch.no_grad()
    def apply(self, tensor: torch.Tensor, *, check: bool = True) -> None:
        """Writes the new values into what the receiver had, in place.

        Args:
            tensor: of this shape and dtype, contiguous.
            check: compares checksums, which reads the whole tensor once.

        Raises:
            ConfigurationError: it has another shape or dtype, or had other values before.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype or not tensor.is_contiguous():
            raise ConfigurationError(
                f"the change is of a contiguous tensor of {tuple(self.shape)} and {self.dtype}, and was applied to one "
                f"of {tuple(tensor.shape)} and {tensor.dtype}"
            )
        flat = tensor.detach().view(-1)
        for run in self.runs:
            run.write(flat)
        if check and checksum(flat) != self.checksum:
            raise ConfigurationError(
                "the receiver does not have what was sent before: its values differ from the trainer's. Send all of "
                "them: export(since=SentWeights())"
            )


class SentWeights:
    """Remembers what an ``export`` has sent, in the memory of a shard of the exported dtype on each rank.

    One for each receiver, or group of receivers that get the same. It is no part of a checkpoint: a training that was
    restored begins with a new one.
    """

    def __init__(self) -> None:
        self._shards: dict[tuple[int, int], torch.Tensor] = {}  # [S], by number of unit and flat parameter
        # of packed weights: empty ones, by how they went
        self.unchanged: dict[tuple[object, ...], list[Change]] = {}

    def replace(self, key: tuple[int, int], shard: torch.Tensor) -> torch.Tensor | None:
        """Notes what is sent now; returns what was sent before, None if it is no part of the same."""
        before = self._shards.get(key)
        self._shards[key] = shard
        fits = before is not None and (before.shape, before.dtype) == (shard.shape, shard.dtype)
        return before if fits else None


def checksum(values: torch.Tensor, first: int = 0) -> int:
    """Returns a sum over all elements, mod 2**64, that depends on the bits of each and on its place.

    Sums of a tensor's parts, each with the place of its first element, add up to that of the tensor.
    """
    return int(mixed_sum(values.reshape(-1), first)) % 2**64


def _exported(
    root: ShardingState,
    rename: _Renaming,
    dtype: torch.dtype | None,
    on: int | None,
    since: SentWeights | None,
) -> Iterator[Iterator[tuple[str, torch.Tensor | Change]]]:
    """Yields what a receiver gets, by unit; what no unit has comes last."""
    modules = list(root.door.named_modules(remove_duplicate=False))
    paths: dict[int, list[str]] = {}  # several, of a module that is shared
    for path, m in modules:
        paths.setdefault(id(m), []).append(path)
    for number, unit in enumerate(dict.fromkeys(state.unit for state in root.states())):
        found: dict[str, torch.Tensor | Change] = {}
        state = next(s for s in root.states() if s.unit is unit)
        if since is None:
            with summoned(state, recurse=False, writeback=False):
                for flat in unit.flats:
                    found.update(_named(flat, _given(flat, dtype, _is_here(root, on)), paths))
            root.group.backend.mark_step()  # one rank alone may read them
        else:
            for k, flat in enumerate(unit.flats):
                find = _changed if flat.originals[0].store is None else partial(_whole_again, state)
                changes = find(flat, (number, k), dtype, on, since)
                found.update(_named(flat, changes if _is_here(root, on) else [], paths))
        yield rename(found)
    rest: dict[str, torch.Tensor | Change] = {}
    if _is_here(root, on):
        rest = {**{n: _cast(p, dtype, n) for n, p in _whole(root)}, **dict(buffers_of(modules))}
    yield rename(rest)


def _whole(root: ShardingState) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((n, p.detach()) for n, p, flat, _ in written_parameters(root.door) if flat is None)


def _check_export(
    root: ShardingState, dtype: torch.dtype | None, on: int | None, since: SentWeights | None
) -> None:
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigurationError(f"weights can't be exported in {dtype!r}; name a floating dtype")
    if on is not None and not 0 <= on < root.group.world_size:
        raise ConfigurationError(f"on={on}: the model is sharded over ranks 0 to {root.group.world_size - 1}")
    for flat in root.all_flats():
        check_saved(flat, "export()", "Take state_dict(), whose DTensors have full_tensor()")
        in_parts = is_in_parts(flat.originals[0])
        if since is not None and (
            flat.store.state is SUMMONED
            or flat.param.element_size() not in INTEGERS
            or (in_parts and dtype is None)
        ):
            raise ConfigurationError(
                f"{flat.names[0]!r} has 16 bytes an element, or is made of several tensors and dtype= is not named, or "
                "this is inside of summon_full_params(): its changes can't be told; leave out since="
            )
    are_apart = any(flat.originals[0].is_apart for flat in root.all_flats())
    if dtype not in root.exported_in and (
        are_apart or any(is_traceable_wrapper_subclass(p) for _, p in _whole(root))
    ):
        for _ in _exported(root, _Renaming(root.door, None), dtype, None, None):
            pass  # on all ranks, once, before anything is sent: a class of weights may have no values of this dtype
        root.exported_in.add(dtype)


@contextlib.contextmanager
def raising_together(sharding: ShardedAPI, what: str) -> Iterator[None]:
    """Raises on all ranks that share a model what a block raises on one of them (collective at its end)."""
    mine, state = None, sharding._state
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        mine = error
    groups = [g for g in (state.group, state.replicas) if g is not None]
    rank = state.group.ranks[state.group.rank]
    fact = None if mine is None else (rank, type(mine).__name__, "".join(traceback.format_exception(mine)))
    for failed in facts_of_all(groups, fact, label=what):
        if failed is not None:
            raise mine or RankFailedError(*failed)


def _is_here(state: ShardingState, on: int | None) -> bool:
    """Says whether this rank gets the values; of replicas, one of them does."""
    return on is None or (state.group.rank == on and (state.replicas is None or state.replicas.rank == 0))


def _cast(values: torch.Tensor, dtype: torch.dtype | None, name: str = "") -> torch.Tensor:
    try:
        made: Tree = values.to(dtype) if dtype is not None and values.is_floating_point() else values
        is_plain = dtype is None or not is_traceable_wrapper_subclass(made)
        return made if is_plain else values.dequantize().to(dtype)
    except Exception as error:  # classes of tensors raise whatever they like
        if type(values) in (torch.Tensor, nn.Parameter):
            raise
        raise ConfigurationError(
            f"{name!r} is a {type(values).__name__}, which gives no values of {dtype} "
            f"({type(error).__name__}: {error}). Leave dtype= out: then it comes as it is"
        ) from error


def _given(flat: FlatParam, dtype: torch.dtype | None, is_here: bool) -> list[torch.Tensor]:
    """Returns values of summoned ones where they are wanted, copies of those that are given back (collective)."""
    given = []
    for k, original in enumerate(flat.originals):
        values: Tree = original.param.detach()
        if original.is_apart:
            listed: Tree = flat.listings[k].param
            try:  # what it is multiplied to is plain on one rank, too
                values = listed.detach().full_tensor() * 1 if listed.requires_grad else copied(values)
            except NotImplementedError as error:
                told = f"{original.name!r} can't be exported as it is updated ({error}). Use shardkit.save"
                raise ConfigurationError(told) from error
        if is_here:
            given.append(_cast(values, dtype, original.name))
    return given


def _named(
    flat: FlatParam, values: Sequence[T], paths: Mapping[int, Sequence[str]]
) -> Iterator[tuple[str, T]]:
    """Yields each original parameter's value under all names that it has in the model; it may be tied."""
    for original, value in zip(flat.originals, values, strict=False):
        for module, name in original.places:
            for path in paths.get(id(module), ()):
                yield name_at(path, name), value


class _Renaming:
    """Gives what is exported the names that a receiver knows; of what it has no name for, nothing is sent."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self._names = names
        self._model: Tree = getattr(model, "_fsdp_wrapped_module", model)
        self._tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        if names == "hf" and not hasattr(self._model, "save_pretrained"):
            raise ConfigurationError(
                f"names='hf' is for models of transformers, and this is a {type(self._model).__name__}; pass a "
                "function from the model's names to the receiver's"
            )
        if names == "hf" and hasattr(self._model, "peft_config"):
            raise ConfigurationError(
                "names='hf' of a model with adapters: an inference engine would get weights without them. Merge them "
                "(merge_adapter() inside of summon_full_params()), and pass a function that gives names, and None for "
                "those of the adapters"
            )

    def __call__(
        self, found: Mapping[str, torch.Tensor | Change]
    ) -> Iterator[tuple[str, torch.Tensor | Change]]:
        if callable(self._names):
            for name, value in found.items():
                if (renamed := self._names(name)) is not None:
                    yield renamed, value
        elif self._names == "hf":
            yield from self._as_saved({n: v for n, v in found.items() if n not in self._tied}).items()
        else:
            yield from found.items()

    def _as_saved(self, found: Mapping[str, torch.Tensor | Change]) -> Mapping[str, torch.Tensor | Change]:
        """Returns it under the names, and in the shapes, that ``save_pretrained`` writes."""
        convert = getattr(sys.modules.get("transformers.modeling_utils"), "revert_weight_conversion", None)
        if convert is None or not found:
            return found
        if all(isinstance(v, torch.Tensor) for v in found.values()):
            converted: Mapping[str, torch.Tensor] = convert(self._model, dict(found))
            return converted
        standing = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in found.items()}
        renamed = convert(self._model, dict(standing))
        origin = {id(tensor): name for name, tensor in standing.items()}
        if {id(tensor) for tensor in renamed.values()} != set(origin):
            raise ConfigurationError(
                f"files of a {type(self._model).__name__} hold other tensors than the model, and what has changed in "
                "them can't be told; leave out names='hf', or since="
            )
        return {name: found[origin[id(tensor)]] for name, tensor in renamed.items()}


# ------------------------------------------------------------ what has changed
class _Part(NamedTuple):
    """One rank's share of a change: memory of a run, if anything is new, which needs no numpy to be pickled."""

    item: int
    checksum: int
    start: int = 0
    gaps: bytearray | None = None
    values: bytearray | None = None


@torch.no_grad()
def _changed(
    flat: FlatParam, key: tuple[int, int], dtype: torch.dtype | None, on: int | None, since: SentWeights
) -> list[Change]:
    """Finds what is new in each original parameter of a flat one (collective); nothing on ranks that don't get it."""
    group, layout = flat.group, flat.layout
    shard = _cast(flat.param.detach().view(-1), dtype)
    if not group.backend.has_storage:
        shard = shard.cpu()  # what follows depends on values, which may be read on all ranks together alone
    elif shard.data_ptr() == flat.param.data_ptr():
        shard = shard.clone()
    before = since.replace(key, shard)
    sent: list[_Part] = []
    for piece in layout.pieces(apart=True):
        if piece.rank == group.rank and not (piece.item in layout.copied and group.rank):
            span = slice(piece.offset, piece.offset + piece.numel)
            part = _Part(piece.item, checksum(shard[span], piece.start))
            run = difference(shard[span], None if before is None else before[span], piece.start)
            if run is not None:
                gaps = None if run.gaps is None else bytearray(memory_of(run.gaps.cpu()))
                part = part._replace(
                    start=run.start, gaps=gaps, values=bytearray(memory_of(run.values.cpu()))
                )
            sent.append(part)
    label = f"what has changed in {flat.label}"
    everything = objects_of(group, sent, -1 if on is None else on, label) or []
    found: list[tuple[list[Run], int]] = [([], 0) for _ in flat.originals]
    for part in chain(*everything):
        runs, total = found[part.item]
        found[part.item] = runs, total + part.checksum
        if part.values:
            behind = None if part.gaps is None else torch.frombuffer(part.gaps, dtype=torch.uint8)
            runs.append(Run(part.start, behind, torch.frombuffer(part.values, dtype=shard.dtype)))
    return [
        Change(original.shape, shard.dtype, tuple(runs), total % 2**64)
        for original, (runs, total) in zip(flat.originals, found, strict=True)
    ]


def _whole_again(
    state: ShardingState,
    flat: FlatParam,
    key: tuple[int, int],
    dtype: torch.dtype | None,
    on: int | None,
    since: SentWeights,
) -> list[Change]:
    """Gives all of what packed weights stand for, where they were not sent before or were loaded since (collective)."""
    held = [run.view(torch.uint8) for o in filter(is_in_parts, flat.originals) for *_, run, _ in o.saved("")]
    shard = torch.cat(held) if held else flat.param.detach().clone()
    before, how = since.replace(key, shard), (*key, dtype, on)
    is_same = before is not None and how in since.unchanged and torch.equal(before, shard)
    if all(flat.group.all_gather_object(is_same, label=f"whether {flat.label} has changed")):
        return since.unchanged[how]
    with summoned(state, recurse=False, writeback=False):
        values = [value.cpu().clone() for value in _given(flat, dtype, _is_here(state, on))]
    changes = [Change(v.shape, v.dtype, (Run(0, None, v.view(-1)),), checksum(v)) for v in values]
    since.unchanged[how] = [replace(change, runs=()) for change in changes]
    return changes
