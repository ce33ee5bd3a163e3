"""All-gathers of blocks.

Legend: W world size, S shard numel, K blocks of a shard, B numbers in a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..backend import Group, Work
from .blocks import BlockFormat
from .feedback import Feedback


class Decoding(Work):
    """A collective of blocks in flight; what they stand for is there when it was waited for."""

    __slots__ = ("_decode", "_work")

    def __init__(self, work: Work, decode: Callable[[], None]) -> None:
        self._work = work
        self._decode: Callable[[], None] | None = decode

    def wait(self) -> None:
        self._work.wait()
        decode, self._decode = self._decode, None  # the blocks' memory goes with it
        if decode is not None:
            with torch.no_grad():
                decode()

    def is_done(self) -> bool:
        return self._work.is_done()


class CompressedGather:
    """Gathers shards as blocks. All ranks get the same values: of its own shard, a rank too gets what blocks stand for.

    Args:
        group: the ranks.
        block_format: of the blocks.
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
        return Decoding(work, lambda: self._format.decode(parts, output.view(self._world, -1)))
