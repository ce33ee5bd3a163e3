"""What is needed to put the shards of all ranks together again without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigurationError
from .state_dict import clean

if TYPE_CHECKING:
    from .wrapper import FSDP


def metadata(wrapper: FSDP) -> dict[str, Any]:
    """Names, shapes and padding of this rank's shards, in fairscale's format (``local_metadata_dict``)."""
    from .wrapper import FSDP

    paths = {m: clean(n) for n, m in wrapper.named_modules()}
    entries: list[dict[str, Any]] = []
    for m in wrapper.modules():
        if not isinstance(m, FSDP):
            continue
        params = {}
        for flat in m._flats:
            name = clean(flat.holder.name) if flat.is_listed_flat else flat.names[0]
            params[name] = {
                "names": list(flat.names),
                "shapes": [member.shape for member in flat.members],
                "numels": list(flat.layout.numels),
                "padding": flat.layout.padding(flat.group.rank),
            }
        entries.append(
            {
                "fsdp_path": paths[m],
                "params": params,
                "no_broadcast_optim_state": m._keeps_optimizer_state,
                "shared_param_info": list(m._shared_paths),
            }
        )
    if entries:
        entries[0]["shared_param_info"] += _shared_across(wrapper, paths)
    return {"param_metadata": entries, "buffer_names": [clean(n) for n, _ in wrapper.named_buffers()]}


def _shared_across(wrapper: FSDP, paths: dict[nn.Module, str]) -> list[tuple[str, str]]:
    """Weights of one wrapper that modules outside of it use too, as (path, other path) from the outermost."""
    from .wrapper import FSDP

    found = []
    for m in wrapper.modules():
        if not isinstance(m, FSDP):
            continue
        inside = {id(x) for x in m.modules()}
        for flat in m._flats:
            for member, name in zip(flat.members, flat.names, strict=True):
                first = f"{paths[m]}.{name}" if paths[m] else name
                for module, attribute in member.places:
                    if id(module) not in inside and module in paths:
                        path = paths[module]
                        found.append((first, f"{path}.{attribute}" if path else attribute))
    return found


def consolidate(
    shard_weights: Sequence[dict[str, torch.Tensor]],
    shard_metadata: Sequence[dict[str, Any]],
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
        ConfigurationError: the lists are empty or differ in length, or (``strict``) a parameter is missing.
    """
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ConfigurationError(
            f"Require metadata for each shard and non-empty shards: got {len(shard_weights)} state dicts and "
            f"{len(shard_metadata)} metadata dicts"
        )
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
            names, shapes, numels, _ = info.values()
            shards = []
            for weights, meta in zip(shard_weights, shard_metadata, strict=True):
                padding = meta["param_metadata"][k]["params"][name]["padding"]
                shard = weights[key].reshape(-1)
                shards.append(shard[: shard.numel() - padding])
                if entry["no_broadcast_optim_state"] or shards[0].numel() == sum(numels):
                    break
            vector = torch.cat(shards)
            for n, shape, part in zip(names, shapes, vector.split(list(numels)), strict=True):
                full[f"{path}.{n}" if path else n] = part.view(shape)
    for entry in shard_metadata[0]["param_metadata"]:
        path = entry["fsdp_path"]
        for source, target in entry["shared_param_info"]:
            joined = [f"{path}.{n}" if path else n for n in (source, target)]
            if joined[0] in full:
                full[joined[1]] = full[joined[0]]
    if with_module_buffers:
        for name in shard_metadata[0]["buffer_names"]:
            if name in shard_weights[0]:
                full[name] = shard_weights[0][name]
    return full
