"""What is needed to put the shards of all ranks together again without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..checks import all_gather_facts, check_one_save, stamp
from ..errors import ConfigurationError
from ..layout import ShardLayout
from ..torch_seams.module_versions import versions_of
from ..types import SavedState, StateDict
from .flat_values import taken_apart
from .names import clean
from .originals import Listing
from .state import ShardingState, state_of

_NOTE = "shardkit_shard"  # in the metadata of a state dict


def metadata(state: ShardingState) -> StateDict:
    """Names, shapes and padding of this rank's shards, in fairscale's format (``local_metadata_dict``)."""
    paths = {m: clean(n) for n, m in state.door.named_modules()}
    entries: list[StateDict] = []
    for s in state.states():
        params = {}
        for listing in s.listings:
            name, layout = _key_of(listing), listing.layout
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
        entries[0]["shared_param_info"] += _shared_across(state, paths)
    return {"param_metadata": entries, "buffer_names": [clean(n) for n, _ in state.door.named_buffers()]}


def _shared_across(state: ShardingState, paths: dict[nn.Module, str]) -> list[tuple[str, str]]:
    """Weights of one wrapper that modules outside of it use too, as (path, other path) from the outermost."""
    found = []
    for s in state.states():
        if not any(len(original.places) > 1 for flat in s.flats for original in flat.originals):
            continue
        inside = {id(x) for x in s.door.modules()}
        for flat in s.flats:
            for original, name in zip(flat.originals, flat.names, strict=True):
                first = f"{paths[s.door]}.{name}" if paths[s.door] else name
                for module, attribute in original.places:
                    if id(module) not in inside and module in paths:
                        path = paths[module]
                        found.append((first, f"{path}.{attribute}" if path else attribute))
    return found


# ------------------------------------------------------------ whose shards they are
def mark(sharding: ShardingState, state: StateDict) -> None:
    """Notes in a local state dict whose it is. ``torch.save`` keeps the note, other readers don't look at it."""
    notes = versions_of(state)
    if notes is not None and "" in notes:
        layout = {key: facts for key, (_, facts) in _listings_by_key(sharding).items()}
        group = sharding.group
        when = stamp(sharding.run_id, sharding.unit.backwards)
        notes[""][_NOTE] = {"rank": group.rank, "world_size": group.world_size, "layout": layout, **when}


def note_of(state: SavedState) -> StateDict | None:
    """What :func:`mark` noted; None of fairscale's state dicts, and of those copied without the attribute."""
    notes = versions_of(state)
    found = notes.get("", {}).get(_NOTE) if isinstance(notes, Mapping) else None
    return found if isinstance(found, dict) and {"rank", "world_size", "layout"} <= set(found) else None


def _key_of(listing: Listing) -> str:
    """Its key in local state dicts, within its unit."""
    module, name = listing.places[0]
    is_flat = all(place.module is not module for original in listing.originals for place in original.places)
    return clean(name) if is_flat else listing.names[0]


def _listings_by_key(state: ShardingState) -> dict[str, tuple[Listing, list[list[object]]]]:
    """Each registered parameter by its key in a local state dict, with names, shapes (and places) of what is in it."""
    found: dict[str, tuple[Listing, list[list[object]]]] = {}
    for path, m in state.door.named_modules():
        s = state_of(m)
        if s is not None:
            for listing in s.listings:
                name = _key_of(listing)
                key = f"{clean(path)}.{name}" if clean(path) else name
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
    problem = _problem(sharding, state)
    group = sharding.group
    everybody = [problem]
    if group.world_size > 1:
        everybody = all_gather_facts(group.channel("control"), problem, label="check of local state dicts")
    wrong = [f"rank {group.ranks[r]}: {what}" for r, what in enumerate(everybody) if what is not None]
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


def consolidate(
    shard_weights: Sequence[dict[str, torch.Tensor]],
    shard_metadata: Sequence[StateDict],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """One full state dict from the local ones of all ranks, without a process group.

    Args:
        shard_weights: ``local_state_dict()`` of each rank, in rank order.
        shard_metadata: ``local_metadata_dict()`` of each rank.
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
    _check_mix(shard_weights, shard_metadata)
    full: dict[str, torch.Tensor] = {}
    for k, entry in enumerate(shard_metadata[0]["param_metadata"]):
        path = entry["fsdp_path"]
        for name, info in entry["params"].items():
            key = f"{path}.{name}" if path else name
            if key not in shard_weights[0]:
                if strict:
                    raise ConfigurationError(
                        f"the state dict of rank 0 has no {key!r}, which its metadata names"
                    )
                continue
            joined = _joined(shard_weights, shard_metadata, k, name, key)
            layout = ShardLayout(tuple(info["numels"]), 1, starts=info.get("starts"))
            for n, shape, part in zip(
                info["names"], info["shapes"], taken_apart(joined, layout), strict=True
            ):
                full[f"{path}.{n}" if path else n] = part.view(shape)
    _add_shared(full, shard_metadata[0]["param_metadata"])
    if with_module_buffers:
        names = shard_metadata[0]["buffer_names"]
        full.update({n: shard_weights[0][n] for n in names if n in shard_weights[0]})
    return full


def _joined(
    shard_weights: Sequence[dict[str, torch.Tensor]], shard_metadata: Sequence[StateDict],
    k: int, name: str, key: str,
) -> torch.Tensor:  # fmt: skip
    """A flat parameter without the padding behind it: ``key`` in the weights, ``name`` of entry ``k`` in the
    metadata.
    """
    entry = shard_metadata[0]["param_metadata"][k]
    numels = entry["params"][name]["numels"]
    shards: list[torch.Tensor] = []
    for weights, meta in zip(shard_weights, shard_metadata, strict=True):
        padding = meta["param_metadata"][k]["params"][name]["padding"]
        shard = weights[key].reshape(-1)
        shards.append(shard[: shard.numel() - padding])
        if entry["no_broadcast_optim_state"] or shards[0].numel() == sum(numels):
            break
    return torch.cat(shards)


def _add_shared(full: dict[str, torch.Tensor], entries: Sequence[StateDict]) -> None:
    """Weights that are used in several places, under each of their names."""
    for entry in entries:
        path = entry["fsdp_path"]
        for source, target in entry["shared_param_info"]:
            joined = [f"{path}.{n}" if path else n for n in (source, target)]
            if joined[0] in full:
                full[joined[1]] = full[joined[0]]
