"""Numbers as blocks of codes with one scale each: functions of tensors, without ranks.

Legend: n numel, B numbers in a block, K blocks of n numbers (n / B rounded up), R parts.

[Note: blocks] A block is B numbers as codes of one byte each, behind their scale in fp32: 4 + B bytes, end to end. 256
of them for the default B = 252, so that blocks and ranks' parts stay aligned; for fp32 that is 0.254 of the bytes. The
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

_SCALE = 4  # bytes
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST = torch.finfo(torch.float32).tiny
_AT_ONCE = 2**20  # numbers; what is computed in between takes so much memory


class BlockFormat:
    """How numbers become blocks, and blocks numbers again.

    Args:
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        numel: B, a multiple of 4.
    """

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype, self.numel = dtype, numel
        self.nbytes = numel + _SCALE
        self._largest = _LARGEST[dtype]

    def blocks_of(self, numel: int) -> int:
        """K of so many numbers."""
        return -(-numel // self.numel)

    def empty(self, blocks: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for so many blocks, [blocks, 4 + B] bytes."""
        return like.new_empty((blocks, self.nbytes), dtype=torch.uint8)

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """[..., 4 + B] bytes -> their scales, [..., 1]."""
        return blocks.view(torch.float32)[..., :1]

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """[..., 4 + B] bytes -> their codes, [..., B]."""
        return blocks[..., _SCALE:].view(self.dtype)

    def encode(
        self, values: torch.Tensor, blocks: torch.Tensor, error: torch.Tensor | None = None, *, complete: bool = True
    ) -> None:  # fmt: skip
        """Writes numbers to blocks.

        Args:
            values: [n], of a floating dtype of at most 4 bytes.
            blocks: [K, 4 + B] bytes.
            error: [n] of a floating dtype, n a multiple of B: added to the values, and what the blocks then miss is
                left in it, but nothing that is not finite.
            complete: error counts everywhere; else only where values are not zero, and elsewhere it stays.
        """
        whole = values.numel() // self.numel
        step = max(1, _AT_ONCE // self.numel)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            part = slice(first * self.numel, last * self.numel)
            kept = None if error is None else error[part].view(-1, self.numel)
            self._encode(values[part].view(-1, self.numel), blocks[first:last], kept, complete)
        if whole < len(blocks):
            rest = values.new_zeros(self.numel)
            rest[: values.numel() - whole * self.numel] = values[whole * self.numel :]
            self._encode(rest.view(1, -1), blocks[whole:], None, complete)

    def _encode(
        self, values: torch.Tensor, blocks: torch.Tensor, error: torch.Tensor | None, complete: bool
    ) -> None:
        """As :meth:`encode`, for values [K, B]."""
        values = values.float()
        there = None
        if error is not None:
            added = error.float()
            if not complete:
                there = values != 0
                added = added * there
            values = values + added
        scales = self._scales(blocks)
        torch.maximum(values.amax(1, True), values.amin(1, True).neg_(), out=scales)
        scales.div_(self._largest).clamp_(min=_SMALLEST)
        scaled = values / scales
        if self.dtype is torch.int8:
            scaled.round_()
        codes = self._codes(blocks)
        codes.copy_(scaled)
        if error is not None:
            missed = values.sub_(scaled.copy_(codes).mul_(scales)).nan_to_num_(0.0, 0.0, 0.0)
            error.copy_(missed if there is None else torch.where(there, missed, error.float()))

    def decode(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what parts of blocks stand for.

        Args:
            blocks: [R, K, 4 + B] bytes.
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
            blocks: [R, K, 4 + B] bytes.
            total: [K * B] of fp32.
        """
        codes, scales = self._codes(blocks), self._scales(blocks)
        sums = total.view(-1, self.numel)
        step = max(1, _AT_ONCE // self.numel)
        for first in range(0, len(sums), step):
            part = slice(first, first + step)
            there = sums[part].copy_(codes[0, part]).mul_(scales[0, part])
            for k in range(1, len(blocks)):
                there.add_(torch.empty_like(there).copy_(codes[k, part]).mul_(scales[k, part]))
