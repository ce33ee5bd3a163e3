"""How gradients that travel together are packed, with flags that say which of them a rank had.

Legend: W world size, F flags of one rank, N numel of the packed form.

[Note: packed gradients] The packed form [N] has a part for each rank: the elements that this rank is to get of the
gradients, padding, and one flag for each gradient of which it gets something. A reduce-scatter leaves a rank its part.
A flag says that a rank had that gradient: a plain process leaves ``grad=None`` where a parameter was not used, and the
optimizer then skips it. So a rank that had none itself looks whether anybody had.

Where tensors own memory the parts are written in one operation, through views laid out beforehand. Where a compiler
decides, they are concatenated. Where two ranks exchange their parts, a rank's own is not written: the other's arrives
in its place, and the gradients are added to it from where autograd left them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, chain, compress, repeat
from operator import attrgetter, is_not, itemgetter

import torch

from ..backend import Group, Work
from ..layout import Piece, gaps_between, rounded_up

_NOTHING = -1  # in place of a gradient's number


@functools.cache
def has_mean(dtype: torch.dtype) -> bool:
    """Says whether backends form the mean: halves are divided before their sum, which could overflow."""
    return dtype not in (torch.float16, torch.bfloat16)


class PackedForm:
    """Says where pieces of gradients and flags lie.

    Args:
        pieces: what each rank gets of which gradient.
        sizes: numel of each rank's part without flags, [W].
        even: all ranks have room for as many flags as the one that needs most.
        step: parts begin at multiples of it.
        flagged: gradients whose flags every rank gets, also where it gets nothing else of them.

    Attributes:
        items: for each rank the gradients that it gets something of, in the order of their flags.
        sizes: numel of each rank's part, [W].
        starts: where each rank's part begins, and N, [W + 1].
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        sizes: Sequence[int],
        *,
        even: bool,
        step: int = 1,
        flagged: Sequence[int] = (),
    ) -> None:
        self.pieces = list(pieces)
        self.first_flag = list(sizes)  # in each rank's part, [W]
        self.items: list[list[int]] = [list(flagged) for _ in sizes]
        for p in pieces if not flagged else ():
            self.items[p.rank].append(p.item)
        counts = [len(items) for items in self.items]
        self.flags = [max(counts)] * len(counts) if even else counts  # F of each rank
        self.sizes = [rounded_up(size + flags, step) for size, flags in zip(sizes, self.flags, strict=True)]
        self.starts = list(accumulate(self.sizes, initial=0))

    def cuts(self, rank: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Cuts a rank's part: the numel of each part of it, and (gradient, place among these) of pieces."""
        numels: list[int] = []
        found, end = [], 0
        for p in (p for p in self.pieces if p.rank == rank):
            if p.offset > end:
                numels.append(p.offset - end)
            found.append((p.item, len(numels)))
            numels.append(p.numel)
            end = p.offset + p.numel
        return [*numels, self.sizes[rank] - end], found

    def anywhere(self, had: Sequence[bool], part: torch.Tensor, rank: int) -> list[bool]:
        """Tells which gradients some rank had, by the part that came here; of others, whether this rank had them.

        It may be several ranks' parts, one after the other, which are not summed.
        """
        found, items, first = list(had), self.items[rank], self.first_flag[rank]
        if part.numel() > self.sizes[rank] > 0:
            part = part.view(-1, self.sizes[rank]).ne(0).any(0)
        flags = (part[first : first + len(items)] != 0).tolist()
        for item, flag in zip(items, flags, strict=True):
            found[item] = found[item] or flag
        return found


@functools.lru_cache(maxsize=256)  # many are written in one form
def _gaps_in(form: PackedForm, in_blocks: bool) -> list[tuple[int, int]]:
    """Lists, as (start, numel), what has to be cleared."""
    filled = [(form.starts[p.rank] + p.offset, p.numel) for p in form.pieces]
    for rank, items in enumerate(form.items):
        at = form.starts[rank] + form.first_flag[rank]
        filled.append((at, len(items)))
        end = at + form.flags[rank]
        if not in_blocks:
            filled.append((end, form.starts[rank + 1] - end))  # up to the next part; says nothing
    return gaps_between(filled, form.starts[-1])


class WrittenPack:
    """The packed form as memory that is written to.

    Args:
        packed: that memory, [N]; it needs to be there while something is written.
        strides: of each, where they are not contiguous.
        in_blocks: it travels as blocks, whose scales are those of all that is in them.
        mean_over: ranks of which each gets the mean of its part, as plain numbers. Two of them may exchange parts
            (``exchanges``): their own are not written then, but completed by :meth:`exchange`.
    """

    def __init__(
        self,
        form: PackedForm,
        packed: torch.Tensor,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]] | None = None,
        in_blocks: bool = False,
        mean_over: Group | None = None,
    ) -> None:
        self._packed, self._parts = packed, packed.split_with_sizes(form.sizes)
        self.exchanges = mean_over is not None and mean_over.exchanges and not in_blocks
        keeper = mean_over.rank if mean_over is not None and self.exchanges else None
        whole: list[Piece] = []
        cut: dict[int, list[Piece]] = {}  # of gradients that lie in several parts, in order
        for p in form.pieces:
            if p.numel == math.prod(shapes[p.item]):
                whole.append(p)
            else:
                cut.setdefault(p.item, []).append(p)
        self._whole = [p.item for p in whole]
        self._cut = {item: [p.numel for p in pieces] for item, pieces in cut.items()}
        self._targets: list[torch.Tensor] = []
        self._arrived: list[torch.Tensor] = []  # where the other rank's are of what is kept
        self._written: list[int] = []  # numbers of pieces, whole ones first
        self._kept: list[int] = []
        for k, p in enumerate(chain(whole, *cut.values())):
            at = form.starts[p.rank] + p.offset
            view = packed[at : at + p.numel]
            if k < len(whole):
                shape = shapes[p.item]
                view = view.view(shape) if strides is None else view.as_strided(shape, strides[p.item])
            (self._arrived if p.rank == keeper else self._targets).append(view)
            (self._kept if p.rank == keeper else self._written).append(k)
        self._flags: list[tuple[list[int], torch.Tensor]] = []
        for rank, items in enumerate(form.items):
            at = form.starts[rank] + form.first_flag[rank]
            if items and rank != keeper:
                self._flags.append((items, packed[at : at + len(items)]))
            elif items:
                self._arrived.append(packed[at : at + len(items)])
        self._own = [] if keeper is None else form.items[keeper]  # whose flags are kept, too
        self._own_ones = packed.new_ones(len(self._own))
        flags = list(map(itemgetter(1), self._flags))
        self._targets += flags
        self._ones = list(map(torch.ones_like, flags))
        self._gaps = [packed[start : start + numel] for start, numel in _gaps_in(form, in_blocks)]

    def write(
        self, gradients: Sequence[torch.Tensor | None], had: Sequence[bool] | None
    ) -> list[torch.Tensor | None]:
        """Copies gradients and flags to their places; returns pieces that are kept.

        Args:
            gradients: of any dtype, dense or sparse.
            had: which of them there are; None if there are all that have a place.
        """
        sources = list(map(gradients.__getitem__, self._whole))
        for k, g in enumerate(sources):
            if g is not None and g.layout is torch.sparse_coo:
                sources[k] = g.to_dense()
        for item, numels in self._cut.items():
            if (g := gradients[item]) is None:
                sources += [None] * len(numels)
            else:
                sources += torch.split_with_sizes(_row(g, g.dtype), numels)
        kept = list(map(sources.__getitem__, self._kept))
        if kept:
            sources = list(map(sources.__getitem__, self._written))
        if self._own:
            own = self._own_ones
            kept.append(own if had is None else own.new_tensor([had[item] for item in self._own]))
        targets, ones = self._targets, self._ones
        if had is None and self._gaps:
            torch._foreach_zero_(self._gaps)
        elif had is not None:  # zeros stand in for what is missing, and a flag of 0
            self._packed.zero_()
            there = list(map(is_not, sources, repeat(None)))
            flags = [v[k : k + 1] for items, v in self._flags for k, item in enumerate(items) if had[item]]
            targets, sources = [*compress(targets, there), *flags], [*compress(sources, there)]
            ones = list(map(torch.ones_like, flags))
        if targets:
            torch._foreach_copy_(targets, sources + ones)  # type: ignore[arg-type]
        return kept

    def exchange(
        self, group: Group, kept: list[torch.Tensor | None], label: str
    ) -> tuple[torch.Tensor, Work]:
        """Starts the mean over two ranks (collective) of what is written and kept; its memory comes with the result."""
        own, other = self._parts if group.rank == 0 else self._parts[::-1]
        mean = own.new_empty(0)
        complete = functools.partial(self._complete, own, mean, kept)
        return mean, group.exchange(own, other, after=complete, async_op=True, label=label)

    def _complete(self, own: torch.Tensor, mean: torch.Tensor, kept: list[torch.Tensor | None]) -> None:
        there = list(map(is_not, kept, repeat(None)))
        if True in there:
            torch._foreach_add_(list(compress(self._arrived, there)), list(compress(kept, there)))  # type: ignore[arg-type]
        kept.clear()  # before the mean has memory
        torch.div(own, 2, out=mean)


class JoinedPack:
    """The packed form by concatenation, without writing into parts of a tensor."""

    def __init__(self, form: PackedForm, numels: Sequence[int]) -> None:
        self._form, self._numels = form, numels
        self._by_rank: list[list[Piece]] = []  # without flags; padding is pieces of no gradient
        self._uncut: list[Piece] = []  # what lies end to end where no flags are between parts
        for rank, size in enumerate(form.first_flag):
            here = [p for p in form.pieces if p.rank == rank]
            gaps = gaps_between([(p.offset, p.numel) for p in here], size)
            here += [Piece(_NOTHING, 0, rank, start, numel) for start, numel in gaps]
            here.sort(key=attrgetter("offset"))
            self._by_rank.append(here)
            for p in here:
                last = self._uncut[-1] if self._uncut else None
                if last is not None and last.item == p.item != _NOTHING:
                    self._uncut[-1] = last._replace(numel=last.numel + p.numel)
                else:
                    self._uncut.append(p)
        self._sent: tuple[object, list[torch.Tensor]] | None = None  # flags, and by rank on the device
        self._elements: torch.Tensor | None = None

    def join(
        self, gradients: Sequence[torch.Tensor | None], had: Sequence[bool] | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Returns the packed form [N]; without ``had``, parts have no flags. Zeros stand in for what is missing.

        Args:
            gradients: of any shape, dense or sparse.
            had: which of them there are.
            like: what has the dtype and device of the result.
        """
        rows = [None if g is None else _row(g, like.dtype) for g in gradients]
        joined: list[torch.Tensor] = []
        flags = None if had is None else self.flags(had, like)
        for rank, pieces in enumerate([self._uncut] if flags is None else self._by_rank):
            for p in pieces:
                row = None if p.item == _NOTHING else rows[p.item]
                if row is None:
                    joined.append(like.new_zeros(p.numel))
                else:
                    joined.append(row if p.numel == row.numel() else row[p.start : p.start + p.numel])
            if flags is not None:
                joined.append(flags[rank])
        return torch.cat(joined) if joined else like.new_zeros(0)

    def split(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """Copies gradients out of what was joined without flags, each in one dimension."""
        # copies: of views, the runtime would keep the whole buffer too, and each use would cost more
        parts = torch.ops.aten.split_with_sizes_copy(joined, [p.numel for p in self._uncut])
        found = {p.item: part for p, part in zip(self._uncut, parts, strict=True)}
        return [found[item] for item in range(len(self._numels))]

    def flags(self, had: Sequence[bool], like: torch.Tensor) -> list[torch.Tensor]:
        """Reads them by rank, [W][F]. They are data, and stay on the device until others are asked for."""
        asked = list(had), like.dtype, like.device
        if self._sent is None or self._sent[0] != asked:
            rows = [[float(had[i]) for i in items] for items in self._form.items]
            rows = [[*row, *[0.0] * (n - len(row))] for row, n in zip(rows, self._form.flags, strict=True)]
            self._sent = asked, [like.new_tensor(row) for row in rows]
        return self._sent[1]

    def used_elements(self, flags: torch.Tensor, rank: int) -> torch.Tensor:
        """Tells for each element of this rank's part, without flags, whether the flag of its gradient [F] is set."""
        if self._elements is None:
            # padding has none; 32 bits, for there is one for each element
            index = torch.full((self._form.first_flag[rank],), len(flags), dtype=torch.int32, device="cpu")
            for k, p in enumerate([p for p in self._form.pieces if p.rank == rank]):
                index[p.offset : p.offset + p.numel] = k
            self._elements = index.to(flags.device)
        return torch.cat([flags, flags.new_zeros(1)]).index_select(0, self._elements) != 0


def _row(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient
    row = dense if dense.dim() == 1 else dense.reshape(-1)
    return row if row.dtype == dtype else row.to(dtype)
