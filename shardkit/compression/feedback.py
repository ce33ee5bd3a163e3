"""What quantization has left out so far, and adds the next time (arXiv 1901.09847)."""

from __future__ import annotations

import torch

from .blocks import BlockFormat


class Feedback:
    """Encodes the same numbers again and again, as those of a gradient: nothing that was left out is lost.

    What a step leaves out is added to the numbers of the next one. It is kept in bf16, whose own rounding is lost: that
    is 1/512 of an error of 1/254 of a number. Where gradients are scaled it is of the last step's scale, also if that
    step is left out for an overflow elsewhere: half a code of a step that was not made, or a whole one of the next.

    Args:
        block_format: of the blocks.
        is_on: keep what was left out; 2 bytes for each number, from the first time on.
    """

    def __init__(self, block_format: BlockFormat, is_on: bool) -> None:
        self._format, self._is_on = block_format, is_on
        self.error: torch.Tensor | None = None  # [n]

    def encode(self, values: torch.Tensor, blocks: torch.Tensor, complete: bool = False) -> None:
        """As :meth:`BlockFormat.encode`; [n], n a multiple of B."""
        if self._is_on and self.error is None:
            self.error = torch.zeros_like(values, dtype=torch.bfloat16)
        self._format.encode(values, blocks, self.error, complete=complete)

    def forget(self) -> None:
        """Nothing was left out."""
        self.error = None
