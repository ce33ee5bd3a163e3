"""An OSS whose step reduces and clips gradients first: for loops without a wrapper that reduces them (ZeRO stage 1).

Each rank has some rows of every parameter and its state, padded alike, as in torch_xla.

Legend: W world size, N rows of a parameter, R rows of one rank: N / W rounded up, S numel of one rank's segment.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Group, ReduceOp
from shardkit.errors import ConfigurationError
from shardkit.layout import Piece, SegmentLayout
from shardkit.optimizer_state.kinds import is_elementwise
from shardkit.oss.optimizer import OSS
from shardkit.oss.segments import FlatSegment
from shardkit.types import ProcessGroup, StateDict, T, Tree

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


# ------------------------------------------------------------ the optimizer


class ReducingOSS(OSS):
    """See :class:`shardkit.OSS`. After a step, parameters show the gradients of this rank that they had before.

    Args:
        grad_clipping, max_norm: whether gradients are clipped, and by which norm of all of them.
        also_over: ranks that have other parts of the model, whose gradients count for the norm too.
        update_dtype: parameters of other dtypes are updated in this one, in copies that are sharded.
        accumulates: gradients are added up in ``update_dtype`` as soon as they are there, and parameters show none.
        reduces_wide: gradients travel in ``update_dtype``.

    Attributes:
        grad_norm: of the last step, before clipping; 0-dim.

    Raises:
        ConfigurationError: ``update_dtype`` with an optimizer that is not known to be element-wise.
    """

    grad_norm: torch.Tensor | None = None
    _kind_of_segments = RowSegment

    def __init__(
        self, params: ParamsT, optim: Callable[..., Optimizer], group: ProcessGroup = None, *,
        grad_clipping: bool = True, max_norm: float = 1.0, also_over: Group | None = None,
        update_dtype: torch.dtype | None = None, accumulates: bool = False, reduces_wide: bool = False,
        **defaults: Tree,
    ) -> None:  # fmt: skip
        entries: list[Tree] = list(params)
        given = [p for entry in entries for p in _parameters_of(entry)]
        is_own = update_dtype is None or all(p.dtype == update_dtype for p in given)
        self._update_dtype = None if is_own else update_dtype
        super().__init__(entries, optim, group, **defaults)
        self.grad_clipping, self.max_norm, self._also_over = grad_clipping, max_norm, also_over
        self._wire = update_dtype if reduces_wide else None
        self._sum_dtype = update_dtype
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        if accumulates:
            trainable = [p for p in self._parameters() if p.requires_grad]
            _adding.update(dict.fromkeys(trainable, weakref.ref(self)))
            hook = functools.partial(
                _add, weakref.ref(self)
            )  # a loop that makes a new optimizer forgets the old one
            self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in trainable]

    @torch.no_grad()
    def add_gradient(self, param: nn.Parameter) -> None:
        """Takes the gradient that a parameter shows into its sum."""
        if param.grad is None:
            return
        gradient = param.grad.to(self._sum_dtype or param.dtype, copy=True)
        self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient
        param.grad = None

    def remove_hooks(self) -> None:
        """From now on, gradients stay where autograd puts them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, and sums of gradients too."""
        super().zero_grad(set_to_none)
        self._sums = {}

    def step(self, closure: Callable[[], T] | None = None, **kwargs: Tree) -> T | None:  # type: ignore[override]
        """Averages the gradients over ranks, clips them, updates this rank's part and publishes it.

        Args:
            closure: computes the loss and the gradients first.
            **kwargs: passed to the inner optimizer's ``step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_trainable()
        local = {p: p.grad for p in self._parameters()}
        try:
            self._reduce()
            if self.grad_clipping:
                self.grad_norm = self.clip_grad_norm(self.max_norm, also_over=self._also_over)
            super().step(**kwargs)
        finally:
            for segment in self.segments():
                segment.stand_down()
            for p, gradient in local.items():
                p.grad = gradient
        return loss

    def _reduce(self) -> None:
        if segments := self.segments():
            channel = self._group.channel("gradients")
            for segment in segments:
                segment.reduce_gradients(channel, self._wire, self._sums if self._hooks else None)
            return
        params = [p for p in self._parameters() if p.requires_grad]
        for p in params:
            if p in self._sums:
                p.grad = self._sums[p].to(p.dtype)
            if (
                self.world_size == 1 and p.grad is not None
            ):  # else the mean is a new tensor; it may be clipped
                p.grad = p.grad.clone()
        average_gradients(params, self._group)


# The optimizer that adds up gradients of a parameter: the last one that was made for it.
_adding: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _add(optimizer: weakref.ref[ReducingOSS], param: torch.Tensor) -> None:
    found = optimizer()
    if found is not None and isinstance(param, nn.Parameter) and _adding.get(param) == optimizer:
        found.add_gradient(param)


def _parameters_of(entry: Tree) -> list[torch.Tensor]:
    """Lists those of one entry of what an optimizer takes: a parameter, a pair with its name, or a group of these."""
    if isinstance(entry, dict):
        inside = entry["params"]
        return (
            [inside] if isinstance(inside, torch.Tensor) else [p for e in inside for p in _parameters_of(e)]
        )
    return [entry[1] if isinstance(entry, tuple) else entry]


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], group: Group) -> None:
    """Replaces gradients by their means over ranks, in one collective.

    Those that some ranks have not count as zeros there; those that no rank has stay None.
    """
    params = list(params)
    if not params or group.world_size == 1:
        return
    rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
    used = torch.tensor([float(p.grad is not None) for p in params]).to(rows[0])
    flat = torch.cat([*rows, used])
    group.channel("gradients").all_reduce(flat, op=ReduceOp.AVG, label="gradients")
    *parts, used = flat.split([*(p.numel() for p in params), len(params)])
    for p, reduced, share in zip(params, parts, used.tolist(), strict=True):
        if share > 0:  # some rank has a gradient
            p.grad = reduced.view_as(p).to(p.dtype)
