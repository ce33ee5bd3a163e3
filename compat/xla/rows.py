"""Rows of every parameter on each rank, padded alike, as in torch_xla: their segments and state dicts.

Legend: W world size, N rows of a parameter, R rows of one rank: N / W rounded up, S numel of one rank's segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkit.backend import Group
from shardkit.errors import ConfigurationError
from shardkit.layout import Piece, SegmentLayout
from shardkit.optimizer_state.kinds import is_elementwise
from shardkit.oss.segments import FlatSegment
from shardkit.types import StateDict, Tree

States = Mapping[int, StateDict]
_NOTE = "sharding"  # torch_xla, which doesn't write it, doesn't look at it


class RowSegment(FlatSegment):
    """A flat segment [S] of some rows of every parameter, [R, ...] one after the other."""

    has_parts = True

    def _laid_out(self) -> SegmentLayout:
        world_size, offset = self.group.world_size, 0
        pieces: list[Piece] = []
        self._places: list[tuple[int, torch.Size]] = []  # within each rank's segment
        for item, p in enumerate(self.params):
            rows = rows_of(torch.empty(p.shape, device="meta"), 0, world_size).shape
            self._places.append((offset, rows))
            for rank in range(world_size):
                start = rank * rows.numel()
                if (numel := min(rows.numel(), p.numel() - start)) > 0:
                    pieces.append(Piece(item, start, rank, offset, numel))
            offset += rows.numel()
        return SegmentLayout(tuple(pieces), (offset,) * world_size)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.view(self.group.world_size, -1)
        return [
            parts[:, at : at + rows.numel()].reshape(-1)[: p.numel()].view(p.shape)
            for p, (at, rows) in zip(self.params, self._places, strict=True)
        ]

    def split_own(self, segment: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Returns this rank's segment [S] as rows [R, ...] of each parameter, which are views of it."""
        return {
            p: segment[at : at + rows.numel()].view(rows)
            for p, (at, rows) in zip(self.params, self._places, strict=True)
        }

    def join_own(self, pieces: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """Returns this rank's segment [S] of whole tensors."""
        wholes = [pieces[p] for p in self.params]
        return self.take_own(wholes, max(wholes, key=lambda whole: whole.dtype.itemsize))


def rows_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Returns a rank's rows [R, ...] of a parameter [N, ...], with zeros behind the last."""
    whole = whole.reshape(1) if whole.dim() == 0 else whole
    size = -(-whole.shape[0] // world_size)
    rows = whole[rank * size : (rank + 1) * size]
    missing = size - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.clone()


def in_rows(whole: StateDict, shapes: Sequence[torch.Size], group: Group) -> StateDict:
    """Returns a whole optimizer's state dict as this rank's."""
    base = {
        i: {
            k: rows_of(v, group.rank, group.world_size) if is_elementwise(k, v, shapes[i]) else v
            for k, v in state.items()
        }
        for i, state in whole["state"].items()
    }
    return as_rows(base, whole["param_groups"], shapes, group)


def as_rows(base: States, groups: Tree, shapes: Sequence[torch.Size], group: Group) -> StateDict:
    """Returns this rank's state dict of its rows of all state."""
    note = {"rank": group.rank, "world_size": group.world_size}
    return {
        "state": {}, "param_groups": groups, "base_state": base, "shape_info": dict(enumerate(shapes)), _NOTE: note
    }  # fmt: skip


def whole_of(
    mine: StateDict, shapes: Sequence[torch.Size], group: Group
) -> tuple[StateDict, dict[int, torch.Tensor]]:
    """Does the reverse (collective): the state dict of the whole optimizer, and the parameters that were saved with it.

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
