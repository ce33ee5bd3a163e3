"""State dicts of sharded modules: full ones, this rank's shards, and pieces for ``torch.distributed.checkpoint`` (DCP).

[Note: pieces] A rank's shard of a flat parameter has a run of elements of some original parameters. Of a parameter with
several dimensions a run is no box, but at most two for each dimension less one more: the end of a row, whole rows, the
beginning of one (and so on within these). DCP's format knows boxes alone, and asks a tensor for its own by the methods
of its protocol ``_Checkpointable``. What it reads is copied into the boxes, which are views of the shard.

[Note: full state dicts] A full state dict is made and loaded unit by unit: a unit's parameters are full while its own
entries are copied, and only then. The entries of modules that hold FSDP modules somewhere below come out right in the
same way, for everything hangs on the hooks and methods that ``nn.Module`` calls for each of its children.

[Note: plain optimizer state] The state of an optimizer over shards has a form in which one process has it:
``optimizer.state_dict()`` of the same optimizer over the same parameters, not sharded: by index, in full shapes. A file
of it is read and written at any world size, and without this library. It needs a shard for each parameter
(``fully_shard``, or ``FSDP(flatten=False)``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks import check_one_save, problems_of_ranks, stamp
from ..errors import ConfigurationError, LifecycleError
from ..flattening.wrapper import FlatParameter
from ..layout import Piece, ShardLayout
from ..optimizer_state.forms import Held, gather_by_index, note_whole_states, shard_by_index
from ..optimizer_state.kinds import Fixed, Leaf, Slot, Span, add_named, noted, piece_of
from ..optimizers.shards import listing_of, refuse_stand_ins, shard_behind
from ..torch_seams.tensors import is_dtensor
from ..torch_seams.wrappers import versions_of
from ..types import AnyCallable, Args, Kwargs, SavedState, StateDict, Tree
from .flat_param import FlatParam, Registered, taken_apart
from .originals import hidden, managing, owner_of, refuse_meta, refuse_split, written_names
from .own_forms import is_in_parts
from .state import (
    INNER,
    OUTER,
    ShardingState,
    clean,
    dotted,
    enter_summon,
    exit_summon,
    named_units,
    plain_name,
    state_of,
    summoned,
)
from .submodule_api import collecting, end_loading_shards

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Pieces(torch.Tensor):
    """Stands for a whole parameter in a state dict for DCP, and has this rank's part of it.

    Shape and dtype are the parameter's; it has no values that an operation could use.
    """

    leaf: Leaf

    @staticmethod
    def __new__(cls, leaf: Leaf) -> Pieces:
        """Makes one of what this rank has, with the shape of all."""
        of = leaf.base
        made: Pieces = torch.Tensor._make_wrapper_subclass(cls, leaf.shape, dtype=of.dtype, device=of.device)
        made.leaf = leaf
        return made

    def __init__(self, leaf: Leaf) -> None:
        """Does nothing: it is made in ``__new__``, as tensors are."""

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {self.dtype}, {self.leaf.numel} elements on this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> NoReturn:
        raise LifecycleError(
            f"{func}: a sharded state dict is for torch.distributed.checkpoint alone, and a tensor in it has this "
            "rank's part of a parameter. For values call state_dict(), on all ranks"
        )

    # ------------------------------------------------------------ DCP's protocol
    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.leaf.base)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.leaf.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets = tuple(index.offset or ())
        return self.leaf.values(next(b for b in self.leaf.boxes if b.offsets == offsets))


# ------------------------------------------------------------ a model's parameters, as it was written
def written_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, FlatParam | None, int]]:
    """Yields (name as it was written, parameter, flat parameter that it lies in, number there); tied ones each time."""
    for path, module in nn.Module.named_modules(model, remove_duplicate=False):
        taken = dict(hidden(module))
        for name in written_names(module):
            own = module.__dict__.get(name)  # an original parameter, whatever is listed in its place
            is_taken = isinstance(own, nn.Parameter) and managing(own) is not None
            param = own if is_taken else module._parameters.get(name, taken.get(name))
            if is_dtensor(param) and (listing := listing_of(param)) is not None:
                param = listing.originals[0].param
            is_shard = isinstance(param, FlatParameter) and shard_behind(param) is not None
            if param is not None and not is_shard:
                listing = shard_behind(param)  # listed in place of one original parameter
                place = owner_of(param) if listing is None else (listing.flat, listing.first)
                yield name_at(path, name), param, *(place or (None, 0))


def sharded_state_dict(state: ShardingState) -> StateDict:
    """Returns parameters and buffers under their own names, for DCP: of what is sharded, this rank's pieces.

    Raises:
        ConfigurationError: a parameter that was wrapped on the meta device has no values yet.
    """
    found: StateDict = {}
    for flat in state.all_flats():
        check_saved(flat, "sharded_state_dict()", "state_dict() has DTensors, which need none of it")
    # what is handed out may be written to, which a rank without rows would not see
    for group in dict.fromkeys(flat.group for flat in state.all_flats() if flat.kept_at is not None):
        group.channel("parameters").agree("sharded_state_dict() of frozen values that are kept")
    for own in state.states():
        own.unit.give_back_frozen()
    for name, param, lies_in, number in written_parameters(state.door):
        if lies_in is None:
            add_named(found, {name: param.detach()})
        else:
            leaves = leaves_of(name, lies_in, number, (0,), ())
            add_named(found, {part: _for_dcp(leaf) for part, leaf in leaves.items()})
    add_named(found, dict(buffers_of(state.door.named_modules())))
    return found


def _for_dcp(leaf: Leaf | Fixed) -> Tree:
    if isinstance(leaf, Fixed):
        return leaf.value
    return Pieces(leaf) if leaf.copies else leaf.base.view(leaf.shape)


def name_at(path: str, name: str) -> str:
    """Returns the name of what a module at this path has, without what wrapping added to it."""
    return plain_name(dotted(path, name))


def check_saved(flat: FlatParam, what: str, instead: str) -> None:
    """Refuses what has no values, or none that :func:`leaves_of` tells."""
    refuse_split([o for o in flat.originals if not is_in_parts(o)], what, instead)
    refuse_meta(flat)


def leaves_of(name: str, flat: FlatParam, number: int, *copies: tuple[int, ...]) -> dict[str, Leaf | Fixed]:
    """Returns what this rank has of an original parameter, by names; ``copies`` of what is cut, and of what is not."""
    original = flat.originals[number]
    if is_in_parts(original):
        parts = {
            part: piece_of(shape, run, cut or Piece(0, 0, 0, 0, shape.numel()), copies[cut is None])
            for part, shape, run, cut in original.saved(name)
        }
        return parts | noted(name, original.facts)
    piece = flat.layout.of_rank(flat.group.rank).get(number)
    return {name: piece_of(original.shape, flat.param.detach(), piece, copies[0])}


def buffers_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of these modules, by path, that a state dict has."""
    for path, m in modules:
        for name, buffer in m._buffers.items():
            if buffer is not None and name not in m._non_persistent_buffers_set:
                yield name_at(path, name), buffer


_NOTE = "shardkit_shard"  # in the metadata of a state dict


def metadata(state: ShardingState) -> StateDict:
    """Returns names, shapes and padding of this rank's shards, in fairscale's format (``local_metadata_dict``)."""
    paths = {m: clean(n) for n, m in state.door.named_modules()}
    entries: list[StateDict] = []
    for s in state.states():
        params = {}
        for listing in s.listings:
            name, layout = _key_of(listing), listing.layout
            if listing.originals[0].is_away:
                raise ConfigurationError(f"{name!r} is in other units alone, since a tie: save state_dict()")
            params[name] = {
                "names": list(listing.names),
                "shapes": [original.shape for original in listing.originals],
                "numels": list(layout.numels),
                "padding": layout.padding(listing.group.rank),
            }
            if layout.starts is not None:  # fairscale has items end to end only
                params[name]["starts"] = list(layout.starts)
        entries.append(
            {
                "fsdp_path": paths[s.door],
                "params": params,
                "no_broadcast_optim_state": s.options.keeps_optimizer_state,
                "shared_param_info": list(s.shared_paths),
            }
        )
    if entries:
        entries[0]["shared_param_info"] += shared_across(state, paths)
    return {"param_metadata": entries, "buffer_names": [clean(n) for n, _ in state.door.named_buffers()]}


def shared_across(state: ShardingState, paths: dict[nn.Module, str]) -> list[tuple[str, str]]:
    """Finds weights of one wrapper that modules outside of it use too, as (path, other path) from the outermost."""
    found = []
    for s in state.states():
        inside = {id(x) for x in s.door.modules()}
        for flat in s.flats:
            for original, name in zip(flat.originals, flat.names, strict=True):
                if original.home != s.home:
                    continue
                first = dotted(paths[s.door], name)
                for module, attribute in original.places:
                    if id(module) not in inside and module in paths:
                        found.append((first, dotted(paths[module], attribute)))
    return found


# ------------------------------------------------------------ whose shards they are
def mark(sharding: ShardingState, state: StateDict, prefix: str = "") -> None:
    """Notes in a local state dict whose it is. ``torch.save`` keeps the note, other readers don't look at it."""
    notes, place = versions_of(state), prefix.removesuffix(".")
    if notes is not None and place in notes:
        layout = {key: facts for key, (_, facts) in _listings_by_key(sharding).items()}
        group = sharding.group
        when = stamp(sharding.run_id, sharding.unit.backwards)
        notes[place][_NOTE] = {"rank": group.rank, "world_size": group.world_size, "layout": layout, **when}


def note_of(state: SavedState) -> StateDict | None:
    """Returns what :func:`mark` noted; None of fairscale's state dicts, and of those copied without the attribute."""
    notes = versions_of(state)
    found = notes.get("", {}).get(_NOTE) if isinstance(notes, Mapping) else None
    return found if isinstance(found, dict) and {"rank", "world_size", "layout"} <= set(found) else None


def _key_of(listing: Registered) -> str:
    """Makes its key in local state dicts, within its unit."""
    module, name = listing.places[0]
    is_flat = all(place.module is not module for original in listing.originals for place in original.places)
    return clean(name) if is_flat else listing.names[0]


def _listings_by_key(state: ShardingState) -> dict[str, tuple[Registered, list[list[object]]]]:
    """Returns registered parameters by their keys in local state dicts, with names, shapes (and places) in them."""
    found: dict[str, tuple[Registered, list[list[object]]]] = {}
    for path, s in named_units(state.door):
        for listing in s.listings:
            key = dotted(clean(path), _key_of(listing))
            originals = zip(listing.names, listing.originals, strict=True)
            facts: list[list[object]] = [[n, list(original.shape)] for n, original in originals]
            for fact, start in zip(facts, listing.layout.starts or (), strict=False):
                fact.append(start)
            found[key] = (listing, facts)
    return found


def check_own(sharding: ShardingState, state: SavedState) -> None:
    """Refuses shards that are not this rank's of this model, on all ranks, before any is taken (collective).

    Raises:
        ConfigurationError: names the rank whose state dict is wrong, and the first tensor.
    """
    told = problems_of_ranks(sharding.group, _problem(sharding, state), "check of local state dicts")
    wrong = [f"rank {rank}: {what}" for rank, what in told]
    if wrong:
        raise ConfigurationError(
            f"load_local_state_dict: {'; '.join(wrong)}. Nothing was loaded on any rank; each rank loads the "
            "local_state_dict() that it saved, at the same world size and of the same wrapped model"
        )


def _problem(sharding: ShardingState, state: SavedState) -> str | None:
    note, flats = note_of(state), _listings_by_key(sharding)
    group = sharding.group
    if note is not None:
        if note["world_size"] != group.world_size:
            return f"the state dict is of world size {note['world_size']}, this is {group.world_size}"
        if note["rank"] != group.rank:
            return f"the state dict is of rank {note['rank']}"
        for key, (_, originals) in flats.items():
            if note["layout"].get(key) != originals:
                return f"{key!r} holds {note['layout'].get(key)} in the state dict, expected {originals}"
    given = {clean(key): value for key, value in state.items()}
    for key, (flat, _) in flats.items():
        value = given.get(key)
        if isinstance(value, torch.Tensor) and value.shape != flat.param.shape:
            return f"{key!r} has shape {tuple(value.shape)} in the state dict, expected {tuple(flat.param.shape)}"
    return None


def _check_mix(shard_weights: Sequence[dict[str, torch.Tensor]], shard_metadata: Sequence[StateDict]) -> None:
    """Refuses shards that are not those of all ranks of one run, where they tell."""
    noted = [(f"state dict {k}", n) for k, n in enumerate(map(note_of, shard_weights)) if n is not None]
    check_one_save([name for name, _ in noted], [note for _, note in noted])
    for rank, (weights, meta) in enumerate(zip(shard_weights, shard_metadata, strict=True)):
        note = note_of(weights)
        if note is not None and (note["rank"], note["world_size"]) != (rank, len(shard_weights)):
            raise ConfigurationError(
                f"state dict {rank} of {len(shard_weights)} is rank {note['rank']}'s of {note['world_size']}; pass "
                "those of all ranks, in rank order"
            )
        first = shard_metadata[0]["param_metadata"]
        for a, b in zip(first, meta["param_metadata"], strict=False):
            for name in sorted(set(a["params"]) | set(b["params"])):
                mine, theirs = (
                    {k: v for k, v in e["params"].get(name, {}).items() if k != "padding"} for e in (a, b)
                )
                if a["fsdp_path"] != b["fsdp_path"] or mine != theirs:
                    raise ConfigurationError(
                        f"shards of different models: {a['fsdp_path']}.{name} is {mine} on rank 0, {b['fsdp_path']}."
                        f"{name} is {theirs} on rank {rank}"
                    )
        if len(first) != len(meta["param_metadata"]):
            raise ConfigurationError(
                f"shards of different models: {len(first)} FSDP modules on rank 0, {len(meta['param_metadata'])} on "
                f"rank {rank}"
            )
        for key, value in weights.items():
            other = shard_weights[0].get(key)
            if isinstance(other, torch.Tensor) and value.dtype != other.dtype:
                raise ConfigurationError(f"{key!r} is {other.dtype} on rank 0, {value.dtype} on rank {rank}")


def _in_rank_order(
    shard_weights: Sequence[dict[str, torch.Tensor]], shard_metadata: Sequence[StateDict]
) -> tuple[Sequence[dict[str, torch.Tensor]], Sequence[StateDict]]:
    """Returns both in the order of the ranks that the weights tell: a folder lists files in any order.

    Metadata tells no rank. Where its padding doesn't grow in that order it may have come in another one than the
    weights, and all stays as it is.
    """
    if any(note_of(weights) is None for weights in shard_weights):
        return shard_weights, shard_metadata
    pairs = sorted(zip(shard_weights, shard_metadata, strict=True), key=lambda pair: note_of(pair[0])["rank"])  # type: ignore[index]
    each = [[p for e in meta["param_metadata"] for p in e["params"].values()] for _, meta in pairs]
    for of_ranks in zip(*each, strict=False):
        padding = [p["padding"] for p in of_ranks]
        if padding != sorted(padding) or any(p.get("starts") for p in of_ranks):
            return shard_weights, shard_metadata
    return [weights for weights, _ in pairs], [meta for _, meta in pairs]


def consolidate(
    shard_weights: Sequence[dict[str, torch.Tensor]],
    shard_metadata: Sequence[StateDict],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """Makes one full state dict from the local ones of all ranks, without a process group.

    Args:
        shard_weights: ``local_state_dict()`` of each rank, in rank order, or in another one if they tell their ranks.
        shard_metadata: ``local_metadata_dict()`` of each rank, in the same order.
        with_module_buffers: take buffers from rank 0.
        strict: a parameter that the metadata names and the weights lack is an error; else it is left out.

    Raises:
        ConfigurationError: the lists are empty or differ in length, the shards are of other ranks, models or dtypes, or
            (``strict``) a parameter is missing.
    """
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ConfigurationError(
            f"Require metadata for each shard and non-empty shards: got {len(shard_weights)} state dicts and "
            f"{len(shard_metadata)} metadata dicts"
        )
    shard_weights, shard_metadata = _in_rank_order(shard_weights, shard_metadata)
    _check_mix(shard_weights, shard_metadata)
    full: dict[str, torch.Tensor] = {}
    for before, key, info, shards in flat_shards(shard_weights, shard_metadata):
        if not shards:
            if strict:
                raise ConfigurationError(f"the state dict of rank 0 has no {key!r}, which its metadata names")
            continue
        joined = torch.cat([value.reshape(-1)[:numel] for value, numel in shards])
        layout = ShardLayout(tuple(info["numels"]), 1, starts=info.get("starts"))
        for n, shape, part in zip(info["names"], info["shapes"], taken_apart(joined, layout), strict=True):
            full[before + n] = part.view(shape)
    for source, target in names_of_shared(shard_metadata[0]):
        if source in full:
            full[target] = full[source]
    if with_module_buffers:
        names = shard_metadata[0]["buffer_names"]
        full.update({n: shard_weights[0][n] for n in names if n in shard_weights[0]})
    return full


def flat_shards(
    shard_weights: Sequence[SavedState], shard_metadata: Sequence[SavedState]
) -> Iterator[tuple[str, str, StateDict, list[tuple[Tree, int]]]]:
    """Yields what local state dicts of all ranks list, registered parameter by registered parameter.

    Of each: the path before names in it, its key in the state dicts, what the metadata says of it, and its shards in
    the order of ranks (none where the first one has none), each with its numel without the padding behind it.
    """
    for k, entry in enumerate(shard_metadata[0]["param_metadata"]):
        before = f"{entry['fsdp_path']}." if entry["fsdp_path"] else ""
        for name, info in entry["params"].items():
            key, shards = before + name, list[tuple[Tree, int]]()
            whole = ShardLayout(tuple(info["numels"]), 1, starts=info.get("starts")).numel
            for weights, meta in zip(shard_weights, shard_metadata, strict=True):
                if key not in shard_weights[0]:
                    break
                numel = math.prod(weights[key].shape)
                shards.append((weights[key], numel - meta["param_metadata"][k]["params"][name]["padding"]))
                if entry["no_broadcast_optim_state"] or shards[0][1] == whole:
                    break
            yield before, key, info, shards


def names_of_shared(shard_metadata: SavedState) -> Iterator[tuple[str, str]]:
    """Yields the names of weights that are used in several places: the first one, and another."""
    for entry in shard_metadata["param_metadata"]:
        for source, target in entry["shared_param_info"]:
            yield dotted(entry["fsdp_path"], source), dotted(entry["fsdp_path"], target)


def _rename(entries: StateDict, prefix: str, rename: Callable[[str], str]) -> None:
    """Renames keys that begin with a prefix, keeping the order."""
    items = list(entries.items())
    entries.clear()
    for key, value in items:
        entries[prefix + rename(key[len(prefix) :]) if key.startswith(prefix) else key] = value


def _without_wrapping(rest: str) -> str:
    for part in (INNER, OUTER):
        if rest.startswith(part):
            return rest[len(part) :]
    return rest


def full_state_dict(state: ShardingState, collect: AnyCallable, *args: object, **kwargs: object) -> StateDict:
    """Returns the full state dict of a wrapper and what is below; ``collect`` is its ``nn.Module.state_dict``."""
    given: StateDict = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    destination, prefix = given.get("destination"), given.get("prefix", "")
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    before = {key: id(value) for key, value in destination.items()}
    is_as_it_is = state.state_is_local or state.summoned is not None
    full = contextlib.nullcontext() if is_as_it_is else summoned(state, recurse=False, writeback=False)
    with full, collecting():
        collect(destination=destination, prefix=prefix, keep_vars=given.get("keep_vars", False))
        _rename(destination, prefix, _without_wrapping)
        if (versions := versions_of(destination)) is not None:
            _rename(versions, prefix, lambda rest: _without_wrapping(rest + ".").removesuffix("."))
        if not state.state_is_local:
            detach_entries(state, destination, prefix, before)
    return destination


def detach_entries(state: ShardingState, destination: StateDict, prefix: str, before: dict[str, int]) -> None:
    """Copies a unit's own entries out of memory that is about to go; buffers get their own dtype back.

    Args:
        before: what was in ``destination``, by key and identity, before the unit added to it.
    """
    below, dtypes = [], {}
    waiting: list[tuple[str, nn.Module]] = [(prefix, state.module)]
    while waiting:  # each of its paths counts, and what is below other units is theirs
        path, m = waiting.pop()
        if state_of(m) not in (None, state):
            below.append(path)
            continue
        for buffer in m._buffers if state.buffer_dtypes else ():
            if (m, buffer) in state.buffer_dtypes:
                dtypes[path + buffer] = state.buffer_dtypes[m, buffer]
        waiting += [(f"{path}{name}.", child) for name, child in m._modules.items() if child is not None]
    theirs = tuple(below)
    only_rank_0 = state.options.state_dict_on_rank_0_only and state.group.rank != 0
    for key in list(destination):
        if not key.startswith(prefix) or before.get(key) == id(destination[key]):
            continue
        if only_rank_0:
            del destination[key]
            continue
        value = destination[key]
        if not isinstance(value, torch.Tensor) or key.startswith(theirs):
            continue
        dtype = dtypes.get(key, value.dtype)
        device = state.options.state_dict_device or value.device
        destination[key] = value.detach().to(device=device, dtype=dtype, copy=True)


# ------------------------------------------------------------ loading
def begin_loading(state: ShardingState, state_dict: StateDict) -> None:
    """Begins putting full values, or shards, into a unit."""
    state.unit.forget_errors()
    if state.state_is_local or state.summoned is not None:
        return
    enter_summon(state, True, "state dict")
    # torch.distributed.checkpoint adds what it finds in a model to what it loads: its shards, to the full values
    own = {id(listing.param) for listing in state.listings}
    for key in [k for k, value in state_dict.items() if id(value) in own]:
        del state_dict[key]


def add_wrapping(wrapper: Any, state_dict: StateDict, prefix: str) -> None:
    """Turns keys of a wrapped module's parameters into those under which the wrapper has them."""
    listed = {n for n, p in wrapper._state.unit_module._parameters.items() if p is not None}
    for key, value in [(k, v) for k, v in state_dict.items() if k.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(OUTER):
            del state_dict[key]
            state_dict[prefix + (OUTER if rest in listed else INNER) + rest] = value


@contextlib.contextmanager
def local_state(states: Iterable[ShardingState]) -> Iterator[None]:
    """Lets state dicts of units hold this rank's shards, inside."""
    before = [(s, s.state_is_local) for s in states]
    for s, _ in before:
        s.state_is_local = True
    try:
        with collecting():
            yield
    finally:
        for s, was_local in before:
            s.state_is_local = was_local


@contextlib.contextmanager
def loading(door: nn.Module) -> Iterator[None]:
    """Leaves nothing summoned behind if loading raises."""
    try:
        yield
    finally:
        for m in reversed(list(door.modules())):
            end_loading_shards(m)
            if (state := state_of(m)) is not None:
                exit_summon(state, "state dict")


# ------------------------------------------------------------ optimizer state over shards
def slot_of(listing: Registered) -> Slot:
    """Returns the slot that stands for original parameters in the state of an optimizer with this listing's shard."""
    rank = listing.group.rank
    here = listing.layout.of_rank(rank)
    spans = []
    for item, (name, original) in enumerate(zip(listing.names, listing.originals, strict=True)):
        piece, is_empty = here.get(item), not original.shape.numel()
        answers = rank == 0 if is_empty else piece is not None and piece.start == 0
        full = dotted(listing.flat.path_of(listing.first + item), name)
        spans.append(Span(full, original.shape, piece, answers))
    join = functools.partial(gather_parts, listing)
    return Slot(listing.param, tuple(spans), True, group=listing.group, join=join)


@torch.no_grad()
def gather_parts(listing: Registered, value: torch.Tensor, keep: bool = True) -> list[torch.Tensor]:
    """Returns the original parameters' parts of a state, on the CPU (collective)."""
    shard = value.detach().as_subclass(torch.Tensor).contiguous().view(-1).to(listing.flat.compute_device)
    full = shard
    if listing.group.world_size > 1:
        full = shard.new_empty(listing.layout.padded_numel)
        listing.group.channel("parameters").all_gather_into(
            full, shard, listing.layout.sizes, label=f"optimizer state of {listing.label}"
        )
    # where execution is lazy, ranks that keep nothing take part only if they wait for it
    pieces = taken_apart(full[: listing.layout.numel].cpu(), listing.layout)
    return [p.view(m.shape).clone() for p, m in zip(pieces, listing.originals, strict=True)]


# ------------------------------------------------------------ by index
def gather_plain(optimizer: Optimizer, keep_on: bool, saved: StateDict | None = None) -> StateDict | None:
    """Returns state (``saved``, else ``optimizer.state_dict()``) as one process has it, on the CPU (collective).

    None where not ``keep_on``.

    Raises:
        ConfigurationError: a shard has several parameters in it.
    """
    saved = optimizer.state_dict() if saved is None else saved
    return gather_by_index(_slots_of(optimizer), saved, keep_on)


def shard_plain(optimizer: Optimizer, full: StateDict) -> StateDict:
    """Returns this rank's part of such a state, for ``optimizer.load_state_dict``; the argument is not changed.

    Raises:
        ConfigurationError: it is of another model.
    """
    return shard_by_index(_slots_of(optimizer), full)


def _slots_of(optimizer: Optimizer) -> list[Slot | None]:
    found = [shard_behind(p) for g in optimizer.param_groups for p in g["params"]]
    return [None if listing is None else slot_of(_of_one(listing)) for listing in found]


def _of_one(listing: Registered) -> Registered:
    if len(listing.originals) != 1:
        raise ConfigurationError(
            f"a shard has {len(listing.originals)} parameters in it ({', '.join(listing.names[:3])}, ...), so that "
            "optimizer state has no place for each: shard by fully_shard(module), or FSDP(module, flatten=False)"
        )
    return listing


def follow_shards(optimizer: Optimizer) -> None:
    """Gives an optimizer that was made before its parameters were sharded the shards in their places.

    Raises:
        ConfigurationError: it has state, which is of whole parameters; or a shard has several parameters in it.
    """
    for group in optimizer.param_groups:
        for k, param in enumerate(group["params"]):
            flat = managing(param) if shard_behind(param) is None else None
            if flat is None:
                continue
            if optimizer.state.get(param):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has stepped, or loaded state, before its model was sharded; shard "
                    "the model first, and load the state afterwards"
                )
            here = [one for one in flat.listings if any(o.param is param for o in one.originals)]
            group["params"][k] = _of_one(here[0]).param


# ------------------------------------------------------------ by name
def parameters_of(model: nn.Module, optimizer: Optimizer) -> dict[int, Held]:
    """Returns all parameters of a model by identity, shards as the core lists them first, the same order on all ranks.

    Raises:
        ConfigurationError: the optimizer has others.
    """
    refuse_stand_ins(optimizer, "state by names")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    position = {id(p): i for i, p in enumerate(params)}
    found: dict[int, Held] = {}
    for path, state in named_units(model):
        for listing in state.listings:
            names = [name_at(path, n) for n in listing.names]
            found[id(listing.param)] = Held(names, slot_of(listing), position.get(id(listing.param), -1))
    for name, param in model.named_parameters():
        found.setdefault(id(param), Held([plain_name(name)], None, position.get(id(param), -1)))
    for param in params:
        if id(param) not in found:
            raise ConfigurationError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model does not list; make "
                "it of model.parameters() after the model was wrapped, and pass the outermost model here"
            )
    return found


note_whole_states(lambda optimizer, saved: gather_plain(optimizer, True, saved) or {}, shard_plain)
