"""Fewer bytes between ranks: numbers travel as blocks of one byte each (ZeRO++, arXiv 2306.10209).

Or, exactly, only those that differ from what was sent before.

Legend: n numel, B numbers in a block, K blocks of n numbers (n / B rounded up), R parts, W world size, S numel of a
rank's part, N numel of all parts.

[Note: blocks] A block is a scale in fp32, 12 bytes of nothing, and B codes of one byte each, so that blocks and the
parts of ranks begin at multiples of 16 bytes. With the default B = 256 it has 272 bytes, 0.266 of those of fp32. The
scale is the largest magnitude divided by the largest code, and at least the smallest normal number of fp32. A code is
the number divided by its scale, rounded to nearest; what it stands for is code times scale, rounded to the dtype of the
output. The last block is filled with zeros.

How far what comes out (in fp32) is from what went in, at most, for finite numbers below 2**127:

- int8: scale / 2, so 1/254 of the block's largest magnitude (rounding of fp32 adds a 10,000th of that);
- float8_e4m3fn: the larger of 1/17 of the number and scale / 1024;
- float8_e5m2: the larger of 1/9 of the number and scale / 131072.

Zeros come out as zeros. A block in which a number is infinite or nan comes out without any finite number: an overflow
shows wherever it is looked for.

[Note: what has changed] A step of a small learning rate changes few numbers of 16 bits: most updates are below half of
the last digit. What differs from the values that were sent before is sent: the distance from the last position in a
byte, and the value. A distance that has no room in a byte is bridged by values that are sent unchanged. Where so much
differs that all values take less, they are all sent. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..backend import DONE, Backend, Group, ReduceOp, Work, WorkThen
from ..errors import ConfigurationError
from ..policy import Compression
from ..torch_seams.tensors import INTEGERS

_HEAD = 16  # bytes before the codes
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST = torch.finfo(torch.float32).tiny
# Numbers at once: on the host what is computed in between stays in its cache, elsewhere it takes so much memory.
_IN_CACHE, _AT_ONCE = 2**17, 2**24


class BlockFormat:
    """Says how numbers become blocks, and blocks numbers again.

    Args:
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        numel: B, a multiple of 16.
    """

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype, self.numel = dtype, numel
        self.nbytes = numel + _HEAD
        self._largest = _LARGEST[dtype]

    def blocks_of(self, numel: int) -> int:
        return -(-numel // self.numel)

    def empty(self, blocks: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory for so many blocks, [blocks, 16 + B] bytes."""
        return like.new_empty((blocks, self.nbytes), dtype=torch.uint8)

    def _blocks_at_once(self, values: torch.Tensor) -> int:
        return max(1, (_IN_CACHE if values.device.type == "cpu" else _AT_ONCE) // self.numel)

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """[..., 16 + B] bytes -> their scales, [..., 1]."""
        return blocks.view(torch.float32)[..., :1]

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """[..., 16 + B] bytes -> their codes, [..., B]."""
        return blocks[..., _HEAD:].view(self.dtype)

    def encode(
        self,
        values: torch.Tensor,
        blocks: torch.Tensor,
        error: torch.Tensor | None = None,
        *,
        complete: bool = True,
    ) -> None:
        """Writes numbers to blocks.

        Args:
            values: [n], of a floating dtype of at most 4 bytes.
            blocks: [K, 16 + B] bytes.
            error: [n] of a floating dtype, n a multiple of B: added to the values, and what the blocks then miss is
                left in it, but nothing that is not finite.
            complete: error counts everywhere; else only where values are not zero, and elsewhere it stays.
        """
        whole = values.numel() // self.numel
        step = min(max(whole, 1), self._blocks_at_once(values))
        scratch = values.new_empty((2, step, self.numel), dtype=torch.float32)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            part = slice(first * self.numel, last * self.numel)
            kept = None if error is None else error[part].view(-1, self.numel)
            rows = values[part].view(-1, self.numel)
            self._encode(rows, blocks[first:last], scratch[:, : last - first], kept, complete)
        if whole < len(blocks):
            rest = pad(values[whole * self.numel :], (0, -values.numel() % self.numel))
            self._encode(rest.view(1, -1), blocks[whole:], scratch[:, :1], None, complete)

    def _encode(
        self,
        values: torch.Tensor,
        blocks: torch.Tensor,
        scratch: torch.Tensor,
        error: torch.Tensor | None,
        complete: bool,
    ) -> None:
        """Encodes values [K, B], with fp32 memory to compute in [2, K, B]."""
        there = None if complete or error is None else values != 0
        sums, scaled = scratch
        if error is not None:
            sums.copy_(error)
            if there is not None:
                sums.mul_(there)
            sums.add_(values)
        elif values.dtype is torch.float32:
            sums = values
        else:
            sums.copy_(values)
        scales, codes = self._scales(blocks), self._codes(blocks)
        torch.maximum(sums.amax(1, True), sums.amin(1, True).neg_(), out=scales)
        scales.div_(self._largest).clamp_(min=_SMALLEST)
        torch.mul(sums, scales.reciprocal(), out=scaled)
        if self.dtype is torch.int8:
            scaled.round_()
        codes.copy_(scaled)
        if error is not None:
            if self.dtype is not torch.int8:
                scaled.copy_(codes)
            missed = sums.addcmul_(scaled, scales, value=-1.0).nan_to_num_(0.0, 0.0, 0.0)
            error.copy_(missed if there is None else torch.where(there, missed, error.float()))

    def decode(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what parts of blocks stand for.

        Args:
            blocks: [R, K, 16 + B] bytes.
            values: [R, n], contiguous, of any floating dtype.
        """
        codes, scales = self._codes(blocks), self._scales(blocks)
        numel = values.shape[1]
        whole, rest = divmod(numel, self.numel)
        if whole:
            places = values[:, : numel - rest].unflatten(1, (whole, self.numel))
            places.copy_(codes[:, :whole]).mul_(scales[:, :whole])
        if rest:
            values[:, numel - rest :].copy_(codes[:, whole, :rest]).mul_(scales[:, whole])

    def sum(self, blocks: torch.Tensor, total: torch.Tensor) -> None:
        """Sums what parts stand for, in fp32 and in their order.

        Args:
            blocks: [R, K, 16 + B] bytes.
            total: [K * B] of fp32.
        """
        codes, scales = self._codes(blocks), self._scales(blocks)
        sums = total.view(-1, self.numel)
        step = self._blocks_at_once(total)
        for first in range(0, len(sums), step):
            part = slice(first, first + step)
            there = sums[part].copy_(codes[0, part]).mul_(scales[0, part])
            for k in range(1, len(blocks)):
                there.add_(torch.empty_like(there).copy_(codes[k, part]).mul_(scales[k, part]))


SMALLEST = 1024
"""Numbers of a rank's part below which it travels as it is: of these (norms, biases) there is little to save."""


def check_compressible(
    compression: Compression | None, dtypes: Iterable[torch.dtype], backend: Backend
) -> None:
    """Raises ConfigurationError for what can't be compressed; alike on all ranks, since options and parameters are."""
    if compression is None:
        return
    if not backend.has_storage:
        raise ConfigurationError(
            f"compression={compression}: on {backend.name} all ranks run one compiled program, whose collectives carry "
            "the program's own dtypes; leave compression out there"
        )
    if torch.float64 in dtypes:
        raise _too_wide(compression)


def _too_wide(compression: Compression) -> ConfigurationError:
    return ConfigurationError(
        f"compression={compression}: float64 numbers don't fit into blocks, whose scales are float32; compute in "
        "float32 or less, or leave compression out"
    )


def format_for(compression: Compression | None, numel: int, dtype: torch.dtype) -> BlockFormat | None:
    """Returns the blocks in which a rank's part of so many numbers travels; None: it travels as it is."""
    if compression is None or numel < SMALLEST or not dtype.is_floating_point:
        return None
    if dtype == torch.float64:
        raise _too_wide(compression)
    return BlockFormat(compression.dtype, compression.block)


class Feedback:
    """Encodes the same numbers again and again, as those of a gradient: nothing that was left out is lost.

    What a step leaves out is added to the numbers of the next one. It is kept in bf16, whose own rounding is lost: that
    is 1/512 of an error of 1/254 of a number. Where gradients are scaled it is of the last step's scale, also if that
    step is left out for an overflow elsewhere: half a code of a step that was not made, or a whole one of the next.

    Args:
        is_on: keep what was left out; 2 bytes for each number, from the first time on.
    """

    def __init__(self, block_format: BlockFormat, is_on: bool) -> None:
        self._format, self._is_on = block_format, is_on
        self.error: torch.Tensor | None = None  # [n]

    def encode(self, values: torch.Tensor, blocks: torch.Tensor, complete: bool = False) -> None:
        """Writes numbers [n], n a multiple of B, to blocks; see :meth:`BlockFormat.encode`."""
        if self._is_on and self.error is None:
            self.error = torch.zeros_like(values, dtype=torch.bfloat16)
        self._format.encode(values, blocks, self.error, complete=complete)

    def forget(self) -> None:
        self.error = None


class CompressedGather:
    """Gathers shards as blocks. All ranks get the same values: of its own shard, a rank too gets what blocks stand for.

    Args:
        feedback: encodes the shards, whose numel is a multiple of B then; None: nothing is added to them.
    """

    def __init__(self, group: Group, block_format: BlockFormat, feedback: Feedback | None = None) -> None:
        self._world, self._rank = group.world_size, group.rank
        self._format = block_format
        self._encode = block_format.encode if feedback is None else feedback.encode

    @torch.no_grad()
    def start(
        self, all_gather_into: Callable[..., Work], output: torch.Tensor, shard: torch.Tensor, label: str
    ) -> Work:
        """Starts one (collective).

        Args:
            all_gather_into: a group's, or that of one of its channels.
            output: [W * S], of any floating dtype; nothing is written to it before the wait.
            shard: [S], of a floating dtype of at most 4 bytes; not needed any more afterwards.
            label: says what it is in errors.
        """
        count = self._format.blocks_of(shard.numel())
        blocks = self._format.empty(self._world * count, output)
        own = blocks[self._rank * count : (self._rank + 1) * count]
        self._encode(shard, own)
        work = all_gather_into(blocks.view(-1), own.view(-1), async_op=True, label=label)
        parts = blocks.view(self._world, count, -1)
        return WorkThen(work, lambda: self._format.decode(parts, output.view(self._world, -1)))


class CompressedReduceScatter:
    """Sums by one all-to-all of blocks: each number is rounded once, and the sum is formed in fp32 and in rank order.

    Args:
        group: the ranks; a channel of theirs.
        sizes: numel of each rank's part, [W].
        error_feedback: what a step leaves out is added to the next one; 2 * N bytes.
    """

    def __init__(
        self, group: Group, block_format: BlockFormat, sizes: Sequence[int], error_feedback: bool
    ) -> None:
        self._group, self._format = group, block_format
        self._bytes = [block_format.blocks_of(size) * block_format.nbytes for size in sizes]
        self._own = block_format.blocks_of(sizes[group.rank])
        self.feedback = Feedback(block_format, error_feedback)

    def start(
        self, parts: torch.Tensor, label: str, *, complete: bool, op: ReduceOp = ReduceOp.SUM
    ) -> tuple[torch.Tensor, Work]:
        """Starts one (collective); returns the sum or mean [S] of fp32, which is there after the wait.

        Args:
            parts: [N], of a floating dtype of at most 4 bytes; not needed any more afterwards.
            label: says what it is in errors.
            complete: all of it is there; zeros stand for what is not.
        """
        group, layout = self._group, self._format
        sent = layout.empty(layout.blocks_of(parts.numel()), parts)
        self.feedback.encode(parts, sent, complete)
        arrived = layout.empty(group.world_size * self._own, parts)
        total = parts.new_empty(self._own * layout.numel, dtype=torch.float32)
        own = self._own * layout.nbytes
        work = group.all_to_all(
            arrived.view(-1), sent.view(-1), [own] * group.world_size, self._bytes, async_op=True, label=label
        )
        by_rank = arrived.view(group.world_size, self._own, layout.nbytes)

        def finish(_: torch.Tensor = sent) -> None:  # which has to last until it is sent
            layout.sum(by_rank, total)
            if op is ReduceOp.AVG:
                total.mul_(1.0 / group.world_size)

        return total, WorkThen(work, finish)


class CompressedAllReduce:
    """Sums on all ranks: a :class:`CompressedReduceScatter` of even parts, then an all-gather of blocks.

    Every rank gets the same bits.

    Args: those of :class:`CompressedReduceScatter`.
    """

    def __init__(self, group: Group, block_format: BlockFormat, numel: int, error_feedback: bool) -> None:
        self.world_size = group.world_size
        self._group = group
        count = -(-block_format.blocks_of(numel) // self.world_size)
        self._part = count * block_format.numel  # S
        self._reduce = CompressedReduceScatter(
            group, block_format, [self._part] * self.world_size, error_feedback
        )
        self._second = Feedback(block_format, error_feedback)  # of the sums
        self._gather = CompressedGather(group, block_format, self._second)

    def forget_errors(self) -> None:
        """Forgets what was left out so far."""
        self._reduce.feedback.forget()
        self._second.forget()

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp, label: str) -> Work:
        """Reduces in place, on [numel] of a floating dtype of at most 4 bytes; returns when it is through."""
        padding = self._part * self.world_size - tensor.numel()
        parts = pad(tensor, (0, padding)) if padding else tensor
        # zeros may be of parameters that had no gradient
        total, work = self._reduce.start(parts, label, complete=False, op=op)
        work.wait()
        self._gather.start(self._group.all_gather_into, parts, total, label).wait()
        if padding:
            tensor.copy_(parts[: tensor.numel()])
        return DONE


# ------------------------------------------------------------ what has changed
_MOST = 255  # what a gap of one byte bridges
_ALL = -1  # in place of a number of values
# Numbers that are summed at once: on the host what is computed in between stays in its cache.
_SUMMED_IN_CACHE, _SUMMED_AT_ONCE = 2**15, 2**23
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

    def places(self, device: torch.device) -> torch.Tensor:
        """Returns the element that each value is of, [n]."""
        if self.gaps is None:
            return torch.arange(self.start, self.start + self.values.numel(), device=device)
        return self.start + self.gaps.to(device).to(torch.int64).cumsum(0)

    def write(self, flat: torch.Tensor) -> None:
        """Writes the values into a tensor of one dimension."""
        values = self.values.to(flat.device)
        if self.gaps is None:
            flat[self.start : self.start + values.numel()] = values
        else:
            flat[self.places(flat.device)] = values


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
    for piece in flat.view(INTEGERS[flat.element_size()]).split(
        _SUMMED_IN_CACHE if flat.is_cpu else _SUMMED_AT_ONCE
    ):
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
