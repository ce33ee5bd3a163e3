"""Optimizer state in which each rank has some rows of every parameter's, padded alike (torch_xla's ZeRO stage 1).

Legend: W world size, N rows of a parameter, R rows of one rank: N / W rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..backend import Group
from ..errors import ConfigurationError
from ..types import StateDict, Tree

States = Mapping[int, StateDict]
_NOTE = "sharding"  # torch_xla, which doesn't write it, doesn't look at it


def rows_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's rows [R, ...] of a parameter [N, ...], with zeros behind the last."""
    whole = whole.reshape(1) if whole.dim() == 0 else whole
    size = -(-whole.shape[0] // world_size)
    rows = whole[rank * size : (rank + 1) * size]
    missing = size - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.clone()


def in_rows(whole: StateDict, shapes: Sequence[torch.Size], group: Group) -> StateDict:
    """A whole optimizer's state dict as this rank's."""
    base = {
        i: {
            k: rows_of(v, group.rank, group.world_size)
            if isinstance(v, torch.Tensor) and v.shape == shapes[i] and k != "step"
            else v
            for k, v in state.items()
        }
        for i, state in whole["state"].items()
    }
    note = {"rank": group.rank, "world_size": group.world_size}
    return {
        **whole, "state": {}, "base_state": base, "shape_info": dict(enumerate(shapes)), _NOTE: note,
    }  # fmt: skip


def whole_of(
    mine: StateDict, shapes: Sequence[torch.Size], group: Group
) -> tuple[StateDict, dict[int, torch.Tensor]]:
    """The reverse (collective): the state dict of the whole optimizer, and the parameters that were saved with it.

    Raises:
        ConfigurationError: on all ranks: a rank's state is another rank's, or of other ranks or parameters.
    """
    parts = {key: mine.get(key, {}) for key in ("base_state", "sharded_master_weights")}
    told = (_problem(mine, shapes, group), parts)
    everybody = group.channel("control").all_gather_object(told, label="optimizer state in rows")
    wrong = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(everybody) if what is not None]
    if wrong:
        raise ConfigurationError(
            f"load_state_dict: {'; '.join(wrong)}. Nothing was loaded; each rank loads what it has saved, with as many "
            "ranks and the same parameters (whole_state_dict() is for others)"
        )
    states = [p["base_state"] for _, p in everybody]
    whole = {
        i: {k: _joined([s[i][k] for s in states], shapes[i], group.world_size) for k in state}
        for i, state in states[0].items()
    }
    weights = [p["sharded_master_weights"] for _, p in everybody]
    masters: dict[int, torch.Tensor] = {
        i: _joined([w[i] for w in weights], shapes[i], group.world_size) for i in weights[0]
    }
    return {"state": whole, "param_groups": mine["param_groups"]}, masters


def _problem(mine: StateDict, shapes: Sequence[torch.Size], group: Group) -> str | None:
    note, place = mine.get(_NOTE), {"rank": group.rank, "world_size": group.world_size}
    if note is not None and note != place:
        here = f"rank {group.rank} of {group.world_size}"
        return f"the state is rank {note['rank']}'s of {note['world_size']}, this is {here}"
    saved = mine.get("shape_info", {})
    for i, shape in enumerate(shapes):
        if tuple(saved.get(i, shape)) != tuple(shape):
            return f"parameter {i} has shape {tuple(shape)}, the saved one {tuple(saved[i])}"
        size = rows_of(torch.empty(shape, device="meta"), 0, group.world_size).shape
        tensors = [
            v for v in mine["base_state"].get(i, {}).values() if isinstance(v, torch.Tensor) and v.dim()
        ]
        if any(v.shape != size and v.dim() == len(size) for v in tensors):
            return f"the state of parameter {i} has other rows than the {size[0]} of each of {group.world_size} ranks"
    return None


def _joined(parts: Sequence[Tree], shape: torch.Size, world_size: int) -> Tree:
    """Rows of all ranks [R, ...] as the whole [N, ...]; anything else is the same on all ranks."""
    first = parts[0]
    size = rows_of(torch.empty(shape, device="meta"), 0, world_size).shape
    tensors = [p.cpu() for p in parts if isinstance(p, torch.Tensor)]
    if not isinstance(first, torch.Tensor) or first.shape != size:
        return first
    return torch.cat(tensors)[: shape[0] if shape else 1].view(shape)
