"""Values of which few differ from what was sent before: these alone are sent, exactly.

[Note: what has changed] A step of a small learning rate changes few numbers of 16 bits: most updates are below half of
the last digit. What differs from the values that were sent before is sent: the distance from the last position in a
byte, and the value. A distance that has no room in a byte is bridged by values that are sent unchanged. Where so much
differs that all values take less, they are all sent. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backend import DONE, Group, Work, WorkThen
from ..torch_seams.tensor_facts import INTEGERS

_MOST = 255  # what a gap of one byte bridges
_ALL = -1  # in place of a number of values
# Numbers that are summed at once: on the host what is computed in between stays in its cache.
_IN_CACHE, _AT_ONCE = 2**15, 2**23
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)  # as int64; of SplitMix64


class Run(NamedTuple):
    """New values of a tensor from one element on.

    Attributes:
        start: the element that positions are counted from.
        gaps: how far each value lies behind the one before, [n], uint8; None where they lie end to end.
        values: [n], in the tensor's dtype.
    """

    start: int
    gaps: torch.Tensor | None
    values: torch.Tensor

    def write(self, flat: torch.Tensor) -> None:
        """Writes the values into a tensor of one dimension."""
        values = self.values.to(flat.device)
        if self.gaps is None:
            flat[self.start : self.start + values.numel()] = values
        else:
            flat[self.start + self.gaps.to(flat.device).to(torch.int64).cumsum(0)] = values


def difference(now: torch.Tensor, before: torch.Tensor | None, start: int) -> Run | None:
    """Finds what differs in a piece [n] that begins at element ``start``; all of it where that is less."""
    if before is None:
        return Run(start, None, now)
    bits = INTEGERS[now.element_size()]
    at = (now.view(bits) != before.view(bits)).nonzero().view(-1)
    if not at.numel():
        return None
    last = torch.cat([at.new_zeros(1), at[:-1]])
    each = 1 + ((at - last - 1).clamp(min=0)) // _MOST  # itself, and values sent unchanged before it
    numel = int(each.sum())
    if numel * (1 + now.element_size()) >= now.nbytes:
        return Run(start, None, now)
    if numel > at.numel():
        step = torch.arange(1, numel + 1, device=at.device) - (each.cumsum(0) - each).repeat_interleave(each)
        at = torch.minimum(last.repeat_interleave(each) + _MOST * step, at.repeat_interleave(each))
    gaps = torch.diff(at, prepend=at.new_zeros(1)).to(torch.uint8)
    return Run(start, gaps, now[at])


def mixed_sum(flat: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns a sum over the elements of [n] that depends on the bits of each and on its place, 0-dim of int64.

    Sums of parts, each with the place of its first element, add up to that of the whole. It is read by nobody here: a
    device would be waited for.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.view(INTEGERS[flat.element_size()]).split(_IN_CACHE if flat.is_cpu else _AT_ONCE):
        at = torch.arange(first, first + piece.numel(), device=piece.device)
        mixed = (piece + at * _ODD[0]) * _ODD[1]
        total += (mixed ^ (mixed >> 29)).sum()
        first += piece.numel()
    return total


class ChangedParts:
    """Brings each rank's part of a buffer to all ranks, where they have what was sent before.

    Args:
        buffer: [N], the parts end to end.
        sizes: numel of each, [W].
    """

    def __init__(self, group: Group, buffer: torch.Tensor, sizes: Sequence[int]) -> None:
        if buffer.dtype is torch.complex128:  # no integer has as many bits
            buffer, sizes = torch.view_as_real(buffer).view(-1), [2 * size for size in sizes]
        self._group, self._buffer, self._sizes = group, buffer, list(sizes)
        self._parts = torch.split_with_sizes(buffer, self._sizes)
        self._before: torch.Tensor | None = None  # [S], of this rank's part
        self._received = torch.empty(0)  # what tells the other parts from others

    def _others(self) -> torch.Tensor:
        """Sums the bits of other ranks' parts, 0-dim of int64."""
        before, behind = sum(self._sizes[: self._group.rank]), sum(self._sizes[: self._group.rank + 1])
        return mixed_sum(self._buffer[:before]) + mixed_sum(self._buffer[behind:], behind)

    def _note(self) -> None:
        self._received = self._others()

    @torch.no_grad()
    def send(self, label: str) -> Work:
        """Sends what has changed (collective); all of it where a rank has much, or not what it has received."""
        group, own = self._group, self._parts[self._group.rank]
        is_same = self._before is not None and torch.equal(self._received, self._others())
        run = difference(own, self._before if is_same else None, 0)
        count = 0 if run is None else _ALL if run.gaps is None else run.values.numel()
        counts = torch.empty(group.world_size, dtype=torch.int64, device=own.device)
        group.all_gather_into(counts, counts.new_tensor([count]), label=f"how many {label}")
        numels = counts.tolist()
        self._before = own.clone()
        if _ALL in numels:
            work = group.all_gather_into(self._buffer, own, self._sizes, async_op=True, label=label)
            return WorkThen(work, self._note)
        if not any(numels):
            return DONE
        width = own.element_size()
        # so that each rank's values can be read in place
        nbytes = [-(-n * (width + 1) // 8) * 8 for n in numels]
        arrived = torch.zeros(sum(nbytes), dtype=torch.uint8, device=own.device)
        rows = torch.split_with_sizes(arrived, nbytes)
        if run is not None and run.gaps is not None:
            sent = torch.cat([run.values.view(torch.uint8), run.gaps])
            rows[group.rank][: sent.numel()] = sent
        work = group.all_gather_into(arrived, rows[group.rank], nbytes, async_op=True, label=label)

        def write() -> None:
            for rank, (part, row, n) in enumerate(zip(self._parts, rows, numels, strict=True)):
                if rank != group.rank and n:
                    values = row[: n * width].view(own.dtype)
                    Run(0, row[n * width : n * (width + 1)], values).write(part)
            self._note()

        return WorkThen(work, write)
