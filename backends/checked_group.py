"""Collectives that check what they are given, alike on every backend.

Legend: W world size, S one rank's shard numel, N sum of all shards' numel.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from shardkit.backend import Group, ReduceOp, Work
from shardkit.errors import ConfigurationError

Sizes: TypeAlias = list[int]  # a numel for each rank


class CheckedGroup(Group):
    """Checks arguments of collectives, and hands them to the methods with an underscore, which a backend implements.

    Those get each rank's numel in a list, whether sizes were given or not. Every check raises a ConfigurationError.
    """

    def all_gather_into(
        self,
        output: Tensor,
        shard: Tensor,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        own, world_size = shard.numel(), self.world_size
        if (  # as check_parts, which costs a call
            sizes is None and output.numel() == own * world_size and shard.dtype == output.dtype
            and output.dim() == shard.dim() == 1 and output.is_contiguous() and shard.is_contiguous()
        ):  # fmt: skip
            parts = [own] * world_size
        else:
            parts = check_parts(self, "all_gather_into", output, shard, sizes)
        return self._all_gather(output, shard, parts, async_op, label)

    def reduce_scatter_into(
        self,
        shard: Tensor,
        input: Tensor,
        sizes: Sequence[int] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        own, world_size = shard.numel(), self.world_size
        if (
            sizes is None and input.numel() == own * world_size and shard.dtype == input.dtype
            and input.dim() == shard.dim() == 1 and input.is_contiguous() and shard.is_contiguous()
        ):  # fmt: skip
            parts = [own] * world_size
        else:
            parts = check_parts(self, "reduce_scatter_into", input, shard, sizes)
        if op is ReduceOp.AVG and not input.is_floating_point():
            self._check_op("reduce_scatter_into", op, input.dtype)
        return self._reduce_scatter(shard, input, parts, op, async_op, label)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        if output.dtype != input.dtype:
            raise ConfigurationError(
                f"rank {self.rank}: all_to_all got an input of {input.dtype} and an output of {output.dtype}; they "
                "have to be the same"
            )
        come, go = (
            self._split("all_to_all", output, output_sizes),
            self._split("all_to_all", input, input_sizes),
        )
        even = output_sizes is None and input_sizes is None
        return self._all_to_all(output, input, come, go, even, async_op, label)

    def all_reduce(
        self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:
        self._check_op("all_reduce", op, tensor.dtype)
        return self._all_reduce(tensor, op, async_op, label)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        check_member(self, "reduce", dst)
        self._check_op("reduce", op, tensor.dtype)
        return self._reduce(tensor, dst, op, async_op, label)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False, label: str = "") -> Work:
        check_member(self, "broadcast", src)
        return self._broadcast(tensor, src, async_op, label)

    # ------------------------------------------------------------ what a backend implements
    @abc.abstractmethod
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        """[S] -> [N]"""

    @abc.abstractmethod
    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """[N] -> [S]"""

    @abc.abstractmethod
    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        """[sum(go)] -> [sum(come)]; ``even``: no sizes were given, so that ranks know each other's."""

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Works in place, on any shape."""

    @abc.abstractmethod
    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Works in place on ``dst``, on any shape."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        """Works in place, on any shape."""

    # ------------------------------------------------------------ checks
    def _check_op(self, operation: str, op: ReduceOp, dtype: torch.dtype) -> None:
        """Refuses an average of integers, which every device would round differently."""
        if op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
            raise ConfigurationError(
                f"rank {self.rank}: {operation} with AVG of {dtype} is not defined; use SUM and divide"
            )

    def _split(self, operation: str, tensor: Tensor, sizes: Sequence[int] | None) -> list[int]:
        """Returns each rank's numel in a tensor that is cut over all of them."""
        world = self.world_size
        if sizes is None and tensor.numel() % world:
            raise ConfigurationError(
                f"rank {self.rank}: {operation}: {tensor.numel()} elements can't be split evenly over {world} ranks; "
                "pass the sizes"
            )
        parts = [tensor.numel() // world] * world if sizes is None else list(sizes)
        if len(parts) != world or sum(parts) != tensor.numel():
            raise ConfigurationError(
                f"rank {self.rank}: {operation} over {world} ranks got {tensor.numel()} elements and sizes {parts}; "
                "sizes need one entry a rank and have to add up to all elements"
            )
        _check_flat(operation, self.rank, tensor)
        return parts


def check_parts(
    group: Group, operation: str, whole: Tensor, shard: Tensor, sizes: Sequence[int] | None
) -> list[int]:
    """Returns each rank's numel in ``whole`` [N], of which ``shard`` [S] is this rank's."""
    own, rank, world_size = shard.numel(), group.rank, group.world_size
    parts = [own] * world_size if sizes is None else list(sizes)
    fit = len(parts) == world_size and parts[rank] == own and sum(parts) == whole.numel()
    flat = whole.dim() == shard.dim() == 1 and whole.is_contiguous() and shard.is_contiguous()
    if fit and flat and shard.dtype == whole.dtype:
        return parts
    if shard.dtype != whole.dtype:
        raise ConfigurationError(
            f"rank {rank}: {operation} got {whole.dtype} and a shard of {shard.dtype}; they have to be the same"
        )
    _check_flat(operation, rank, whole)
    _check_flat(operation, rank, shard)
    raise ConfigurationError(
        f"rank {rank}: {operation} over {world_size} ranks got {whole.numel()} elements, a shard of {own} and sizes "
        f"{parts if sizes is not None else '(none: even)'}; sizes need one entry a rank, have to "
        "add up to all elements and fit this rank's shard"
    )


def _check_flat(operation: str, rank: int, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"rank {rank}: {operation} needs 1-D contiguous tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def check_member(group: Group, operation: str, other: int) -> None:
    """Raises ConfigurationError unless ``other`` is a rank of the group."""
    if not 0 <= other < group.world_size:
        raise ConfigurationError(
            f"rank {group.rank}: {operation} with rank {other}, but the group's ranks are 0 to {group.world_size - 1} "
            "(ranks within the group, not global ones)"
        )


def check_members(group: Group, ranks: Sequence[int]) -> list[int]:
    """Returns the group ranks of a sub-group, in ascending order."""
    chosen, world_size = sorted(ranks), group.world_size
    if not chosen or len(set(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ConfigurationError(
            f"rank {group.rank}: a sub-group of {world_size} ranks can't have the ranks {list(ranks)}; give "
            f"distinct ranks of this group, 0 to {world_size - 1}"
        )
    return chosen


def is_group(thing: object) -> TypeGuard[Group]:
    """Whether it is one of our groups, or wraps one."""
    return callable(getattr(thing, "all_gather_into", None))


def size_of(process_group: object) -> int | None:
    """Returns how many ranks an object with ``rank()`` and ``size()`` has; None for all other objects."""
    size = getattr(process_group, "size", None)
    return size() if callable(size) and callable(getattr(process_group, "rank", None)) else None
