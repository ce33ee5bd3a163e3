"""Reduces the gradients of a vector's members to each rank's shard.

Legend: W world size, S shard numel, F flags in one rank's part.

[Note: packed gradients] When a unit's gradients are there, one operation copies them into a buffer [W * (S + F)] whose
part for a rank has the rank's shard of the vector, and then one flag for each member that lies there. Their own
memory is given back, and one reduce-scatter makes the part of this rank. A flag says that a rank had a gradient for the
member. A rank that lacks one itself looks whether anybody had: a plain process leaves ``grad=None`` where a
parameter was not used, and the optimizer then skips it (see ``idle.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backend import Group, ReduceOp, Work
from ..layout import Piece, gaps_between
from ..reduction.shard_gradients import gradient_class
from .flat_param import FlatParam
from .idle import protect_idle_members
from .members import as_tensors


class GradientPack:
    """Packs, reduces and hands over the gradients of one vector.

    Args:
        flat: whose members' gradients these are.
        group: ranks that share the vector; its channel for gradients.
        reduce_dtype: dtype on the wire; None for the gradients' own.
        divisors: the sum over ranks is divided by the first before and by the second after it is formed.
    """

    def __init__(
        self, flat: FlatParam, group: Group, reduce_dtype: torch.dtype | None, divisors: tuple[float, float]
    ) -> None:
        self._flat = flat
        self._group = group
        own = flat.compute_dtype
        self._dtype = reduce_dtype if reduce_dtype is not None and own.is_floating_point else own
        self._before, self._after = divisors
        self._gradient_class: Any = gradient_class(flat.group, "the FSDP root's clip_grad_norm_", True)
        self._is_plain_mean = self._before * self._after == group.world_size and _has_mean(self._dtype)
        self.trainable = [m.param.requires_grad for m in flat.members]
        layout = flat.layout
        self._pieces = [p for p in layout.pieces() if self.trainable[p.item]]
        items: list[list[int]] = [[] for _ in range(layout.world_size)]
        for p in self._pieces:
            items[p.rank].append(p.item)
        self._flagged = items[group.rank]  # members with a part here, in order of their flags
        self._flags_of = items
        self._flags = max(len(i) for i in items)
        self._part = layout.shard_numel + self._flags
        self._in_storage = group.backend.has_storage and group.world_size > 1
        self._is_lazy = not group.backend.has_storage and group.world_size > 1
        self._slots: torch.Tensor | None = None
        if self._in_storage:
            self._lay_out()

    def _lay_out(self) -> None:
        """Views of the packed form for each gradient; its memory exists while it is in use."""
        flat = self._flat
        self._packed = torch.empty(
            self._part * self._group.world_size, dtype=self._dtype, device=flat.compute_device
        )
        self._whole: list[int] = []  # members that lie in one part
        self._targets: list[torch.Tensor] = []
        self._cut: list[tuple[Piece, torch.Tensor]] = []
        for p in self._pieces:
            at = p.rank * self._part + p.offset
            view = self._packed[at : at + p.numel]
            member = flat.members[p.item]
            if p.numel == member.shape.numel():
                self._whole.append(p.item)
                self._targets.append(view.view(member.shape))
            else:
                self._cut.append((p, view))
        size = flat.layout.shard_numel
        self._flag_views = [
            self._packed[r * self._part + size : r * self._part + size + len(items)]
            for r, items in enumerate(self._flags_of)
        ]
        self._targets += [view for _, view in self._cut] + self._flag_views
        self._ones = [torch.ones_like(v) for v in self._flag_views]
        self._gaps = self._find_gaps()
        self._group.backend.release_storage(self._packed)

    def _find_gaps(self) -> list[torch.Tensor]:
        """What no gradient fills: padding, frozen members, flags that a rank does not need."""
        size, part = self._flat.layout.shard_numel, self._part
        filled = [(p.rank * part + p.offset, p.numel) for p in self._pieces]
        filled += [(r * part + size, len(items)) for r, items in enumerate(self._flags_of)]
        gaps = gaps_between(filled, part * self._group.world_size)
        return [self._packed[start : start + numel] for start, numel in gaps]

    # ------------------------------------------------------------ sending
    def send(self) -> None:
        """Takes the members' gradients and starts their reduction (collective)."""
        self._work: Work | None = None
        packed = self._take_gradients()
        if self._group.world_size == 1:
            self._result = packed
            return
        if self._is_lazy and True not in self._had:  # on no rank, or they are out of step
            return
        size = packed.numel() // self._group.world_size
        self._result = torch.empty(size, dtype=self._dtype, device=self._flat.compute_device)
        if self._before != 1.0 and not self._is_plain_mean:
            packed.mul_(1.0 / self._before)
        op = ReduceOp.AVG if self._is_plain_mean else ReduceOp.SUM
        self._work = self._group.reduce_scatter_into(
            self._result, packed, op=op, async_op=True, label=f"gradients of {self._flat.label}"
        )

    def _take_gradients(self) -> torch.Tensor:
        """The packed form; the gradients' own memory is given back before anything else is allocated."""
        with as_tensors():
            gradients = [m.param.grad for m in self._flat.members]
            for m in self._flat.members:
                m.param.grad = None
        self._had = [g is not None for g in gradients]
        if not self._in_storage:
            return self._joined(gradients)
        self._group.backend.take_storage(self._packed)
        self._pack(gradients)
        return self._packed

    def _has_all(self) -> bool:
        """Whether this rank had a gradient for every trainable member."""
        return False not in [h for h, t in zip(self._had, self.trainable, strict=True) if t]

    def _pack(self, gradients: Sequence[torch.Tensor | None]) -> None:
        sources = [gradients[i] for i in self._whole] + [None] * (len(self._targets) - len(self._whole))
        count = len(self._whole)
        flat_views: dict[int, torch.Tensor] = {}
        for k, (piece, _) in enumerate(self._cut):
            g = gradients[piece.item]
            if g is not None:
                if piece.item not in flat_views:
                    flat_views[piece.item] = (g.to_dense() if g.layout is torch.sparse_coo else g).reshape(-1)
                sources[count + k] = flat_views[piece.item][piece.start : piece.start + piece.numel]
        count += len(self._cut)
        sources[count:] = self._ones
        if self._has_all():
            for k in range(len(self._whole)):
                if sources[k].layout is torch.sparse_coo:  # type: ignore[union-attr]
                    sources[k] = sources[k].to_dense()  # type: ignore[union-attr]
            torch._foreach_copy_(self._targets, sources)  # type: ignore[arg-type]
            if self._gaps:
                torch._foreach_zero_(self._gaps)
            return
        self._packed.zero_()
        for target, source in zip(self._targets[:count], sources[:count], strict=True):
            if source is not None:
                target.copy_(source.to_dense() if source.layout is torch.sparse_coo else source)
        for view, items in zip(self._flag_views, self._flags_of, strict=True):
            for k, item in enumerate(items):
                if gradients[item] is not None:
                    view[k] = 1

    def _joined(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The same in one new tensor, without writing into parts of it: [N] for W = 1, else [W * S] or [W * (S + F)].

        Flags are there if a gradient is missing. Another rank that misses none sends none; the two run different
        programs then, and are out of step.
        """
        flat, rows = self._flat, []
        for m, g in zip(flat.members, gradients, strict=True):
            if g is None:
                rows.append(torch.zeros(m.shape.numel(), dtype=self._dtype, device=flat.compute_device))
            else:
                dense = g.to_dense() if g.layout is torch.sparse_coo else g
                row = dense if dense.dim() == 1 else dense.reshape(-1)
                rows.append(row if row.dtype == self._dtype else row.to(self._dtype))
        layout = flat.layout
        if layout.padded_numel != layout.numel:
            padding = layout.padded_numel - layout.numel
            rows.append(torch.zeros(padding, dtype=self._dtype, device=flat.compute_device))
        joined = torch.cat(rows)
        if not self._is_lazy or self._has_all():
            return joined
        parts = joined.view(layout.world_size, layout.shard_numel)
        flags = torch.tensor(
            [
                [float(gradients[i] is not None) for i in items] + [0.0] * (self._flags - len(items))
                for items in self._flags_of
            ],
            dtype=self._dtype,
        ).to(parts.device)
        return torch.cat([parts, flags], 1).view(-1)

    # ------------------------------------------------------------ receiving
    def is_done(self) -> bool:
        """Whether :meth:`receive` would not wait."""
        return self._work is None or self._work.is_done()

    def receive(self, replicas: Group | None) -> None:
        """Waits for the reduction, and adds the result to the shard's gradient.

        Args:
            replicas: ranks that hold the same shard; the result is averaged over them too.
        """
        if self._is_lazy and True not in self._had:
            if False not in self._flat.idle:
                self._flat.param.grad = None  # see LocalGradients: it may be zeros that stand for nothing
            return
        flat, result = self._flat, self._result
        del self._result
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._in_storage:
                self._group.backend.release_storage(self._packed)
        if replicas is not None:
            self._average(result, replicas)
        if not self._is_plain_mean and self._after != 1.0 and self._group.world_size > 1:
            result.mul_(1.0 / self._after)
        elif self._group.world_size == 1 and self._before * self._after != 1.0:
            result.mul_(1.0 / (self._before * self._after))
        if self._is_lazy:
            self._note_used(result)
        else:
            if not self._note_idle(result, replicas):
                return
        gradient = result
        if result.numel() != flat.layout.shard_numel:
            gradient = result[: flat.layout.shard_numel]
        if self._is_lazy:
            gradient = gradient.clone()  # else the tensor that it is a view of lives on beside it
        param = flat.param
        if gradient.dtype != param.dtype or gradient.device != param.device:
            gradient = gradient.to(device=param.device, dtype=param.dtype)
        if gradient.shape != param.shape:
            gradient = gradient.view(param.shape)
        gradient = _through_hooks(param, gradient)
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.add_(gradient)
        if type(param.grad) is torch.Tensor:
            param.grad.__class__ = self._gradient_class
        for after in (param._post_accumulate_grad_hooks or {}).values():
            after(param)

    def _note_idle(self, result: torch.Tensor, replicas: Group | None) -> bool:
        """Which members had no gradient; whether any member with a part here had one."""
        flat, had = self._flat, self._had
        if not self._has_all():
            had = self._anybody(result, replicas)
        here = self._flagged or range(len(had))
        if True not in [had[i] for i in here]:
            if False not in [flat.idle[i] for i in here]:
                flat.param.grad = None  # see LocalGradients: it may be zeros that stand for nothing
            return False
        if flat.param.grad is None:
            flat.idle = [not h for h in had]
        elif True in flat.idle:
            flat.idle = [i and not h for i, h in zip(flat.idle, had, strict=True)]
        if True in flat.idle:
            protect_idle_members(flat)
        return True

    def _note_used(self, result: torch.Tensor) -> None:
        """The same as data: values are not known yet, and all ranks have to build one program."""
        flat = self._flat
        used = None
        if not self._has_all() or False in self.trainable:
            size = flat.layout.shard_numel
            flags = result.new_ones(self._flags) if self._has_all() else result[size:]
            used = torch.cat([flags, flags.new_zeros(1)]).index_select(0, self._slots_of_elements()) != 0
        flat.idle = [False] * len(flat.members)
        if flat.param.grad is None:
            flat.used = used
        elif flat.used is not None:
            flat.used = None if used is None else flat.used | used
        if flat.used is not None:
            protect_idle_members(flat)

    def _slots_of_elements(self) -> torch.Tensor:
        """For each element of this rank's shard the index of its member's flag, [S]; the last one if it has none."""
        if self._slots is None:
            slots = torch.full((self._flat.layout.shard_numel,), self._flags)
            here = [p for p in self._pieces if p.rank == self._group.rank]
            for k, p in enumerate(here):
                slots[p.offset : p.offset + p.numel] = k
            self._slots = slots.to(self._flat.compute_device)
        return self._slots

    def _average(self, result: torch.Tensor, replicas: Group) -> None:
        has_mean = _has_mean(result.dtype)
        if not has_mean:
            result.mul_(1.0 / replicas.world_size)
        replicas.all_reduce(
            result, op=ReduceOp.AVG if has_mean else ReduceOp.SUM, label=f"gradients of {self._flat.label}"
        ).wait()

    def _anybody(self, result: torch.Tensor, replicas: Group | None) -> list[bool]:
        """Which members have a gradient on some rank, as far as they have a part here."""
        if self._group.world_size == 1 and replicas is None:
            return self._had
        had = list(self._had)
        if self._group.world_size > 1:
            start = self._flat.layout.shard_numel
            flags = (result[start : start + len(self._flagged)] != 0).tolist()
            for item, flag in zip(self._flagged, flags, strict=True):
                had[item] = had[item] or flag
        return had


def _has_mean(dtype: torch.dtype) -> bool:
    """Whether backends form the mean: halves are divided before their sum, which could overflow."""
    return dtype not in (torch.float16, torch.bfloat16)


def _through_hooks(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Runs hooks that users registered on a shard, which autograd never sees: they get the reduced gradient."""
    for hook in (param._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def predivide_factor(world_size: int) -> int:
    """The power of two next to the root of the world size that divides it (fairscale's choice)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor
