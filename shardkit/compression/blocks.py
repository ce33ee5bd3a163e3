"""Numbers as blocks of codes with one scale each: functions of tensors, without ranks.

Legend: n numel, B numbers in a block, K blocks of n numbers (n / B rounded up), R parts.

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
"""

from __future__ import annotations

import torch

_HEAD = 16  # bytes before the codes
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST = torch.finfo(torch.float32).tiny
# Numbers at once: on the host what is computed in between stays in its cache, elsewhere it takes so much memory.
_IN_CACHE, _AT_ONCE = 2**17, 2**24


class BlockFormat:
    """How numbers become blocks, and blocks numbers again.

    Args:
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        numel: B, a multiple of 16.
    """

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype, self.numel = dtype, numel
        self.nbytes = numel + _HEAD
        self._largest = _LARGEST[dtype]

    def blocks_of(self, numel: int) -> int:
        """K of so many numbers."""
        return -(-numel // self.numel)

    def empty(self, blocks: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for so many blocks, [blocks, 16 + B] bytes."""
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
        self, values: torch.Tensor, blocks: torch.Tensor, error: torch.Tensor | None = None, *, complete: bool = True
    ) -> None:  # fmt: skip
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
            rest = values.new_zeros(self.numel)
            rest[: values.numel() - whole * self.numel] = values[whole * self.numel :]
            self._encode(rest.view(1, -1), blocks[whole:], scratch[:, :1], None, complete)

    def _encode(
        self, values: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor, error: torch.Tensor | None,
        complete: bool,
    ) -> None:  # fmt: skip
        """As :meth:`encode`, for values [K, B], with fp32 memory to compute in [2, K, B]."""
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
