"""Sums over ranks by exchanging blocks.

Legend: W world size, N numel of all parts, S numel of this rank's part, B numbers in a block; all are multiples of B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import DONE, Group, ReduceOp, Work
from .blocks import BlockFormat
from .feedback import Feedback
from .gathering import CompressedGather, Decoding


class CompressedReduceScatter:
    """Sums by one all-to-all of blocks: each number is rounded once, and the sum is formed in fp32 and in rank order.

    Args:
        group: the ranks; a channel of theirs.
        block_format: of the blocks.
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

        return total, Decoding(work, finish)


class CompressedAllReduce:
    """Sums on all ranks: a :class:`CompressedReduceScatter` of even parts, then an all-gather of blocks.

    Every rank gets the same bits.

    Args: those of :class:`CompressedReduceScatter`.

    Attributes:
        world_size: W.
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
        """What was left out so far is not added to anything."""
        self._reduce.feedback.forget()
        self._second.forget()

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp, label: str) -> Work:
        """In place, [numel] of a floating dtype of at most 4 bytes; returns when it is through."""
        padded = self._part * self.world_size
        parts = tensor
        if padded != tensor.numel():
            parts = tensor.new_zeros(padded)
            parts[: tensor.numel()] = tensor
        # zeros may be of parameters that had no gradient
        total, work = self._reduce.start(parts, label, complete=False, op=op)
        work.wait()
        whole = tensor if padded == tensor.numel() else tensor.new_empty(padded)
        self._gather.start(self._group.all_gather_into, whole, total, label).wait()
        if whole is not tensor:
            tensor.copy_(whole[: tensor.numel()])
        return DONE
