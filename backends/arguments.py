"""Checks of the arguments of collectives, the same on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from shardkit.backend import Group, ReduceOp
from shardkit.errors import ConfigurationError


def is_group(thing: object) -> TypeGuard[Group]:
    """Whether it is one of our groups, or wraps one."""
    return callable(getattr(thing, "all_gather_into", None))


def size_of(process_group: object) -> int | None:
    """How many ranks an object with ``rank()`` and ``size()`` has; None for all other objects."""
    size = getattr(process_group, "size", None)
    return size() if callable(size) and callable(getattr(process_group, "rank", None)) else None


def check_parts(
    operation: str, rank: int, world_size: int, whole: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None
) -> list[int]:  # fmt: skip
    """Each rank's numel in ``whole`` [N], of which ``shard`` [S] is this rank's.

    Raises:
        ConfigurationError: they don't fit together, or a tensor is not 1-D and contiguous.
    """
    own = shard.numel()
    parts = [own] * world_size if sizes is None else list(sizes)
    if (
        len(parts) == world_size and parts[rank] == own and sum(parts) == whole.numel() and shard.dtype == whole.dtype
        and whole.dim() == shard.dim() == 1 and whole.is_contiguous() and shard.is_contiguous()
    ):  # fmt: skip
        return parts  # in one expression: this runs for every collective
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


def check_exchange(
    operation: str, rank: int, world_size: int, output: torch.Tensor, input: torch.Tensor,
    output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """How many elements come from and go to each rank.

    Raises:
        ConfigurationError: they don't fit the tensors, or a tensor is not 1-D and contiguous.
    """
    if output.dtype != input.dtype:
        raise ConfigurationError(
            f"rank {rank}: {operation} got an input of {input.dtype} and an output of {output.dtype}; they have to be "
            "the same"
        )
    come = _check_split(operation, rank, world_size, output, output_sizes)
    return come, _check_split(operation, rank, world_size, input, input_sizes)


def _check_split(
    operation: str, rank: int, world_size: int, tensor: torch.Tensor, sizes: Sequence[int] | None
) -> list[int]:
    if sizes is None and tensor.numel() % world_size:
        raise ConfigurationError(
            f"rank {rank}: {operation}: {tensor.numel()} elements can't be split evenly over {world_size} ranks; "
            "pass the sizes"
        )
    parts = [tensor.numel() // world_size] * world_size if sizes is None else list(sizes)
    if len(parts) != world_size or sum(parts) != tensor.numel():
        raise ConfigurationError(
            f"rank {rank}: {operation} over {world_size} ranks got {tensor.numel()} elements and sizes {parts}; sizes "
            "need one entry a rank and have to add up to all elements"
        )
    _check_flat(operation, rank, tensor)
    return parts


def _check_flat(operation: str, rank: int, tensor: torch.Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"rank {rank}: {operation} needs 1-D contiguous tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def check_op(operation: str, rank: int, op: ReduceOp, dtype: torch.dtype) -> None:
    """Raises ConfigurationError for an average of integers, which every device would round differently."""
    if op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(
            f"rank {rank}: {operation} with AVG of {dtype} is not defined; use SUM and divide"
        )


def check_member(operation: str, rank: int, world_size: int, other: int) -> None:
    """Raises ConfigurationError unless ``other`` is a rank of the group."""
    if not 0 <= other < world_size:
        raise ConfigurationError(
            f"rank {rank}: {operation} with rank {other}, but the group's ranks are 0 to {world_size - 1} (ranks "
            "within the group, not global ones)"
        )


def check_members(rank: int, world_size: int, ranks: Sequence[int]) -> list[int]:
    """The group ranks of a sub-group, in ascending order.

    Raises:
        ConfigurationError: none, a rank twice, or one that is not in the group.
    """
    chosen = sorted(ranks)
    if not chosen or len(set(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ConfigurationError(
            f"rank {rank}: a sub-group of {world_size} ranks can't have the ranks {list(ranks)}; give distinct ranks "
            f"of this group, 0 to {world_size - 1}"
        )
    return chosen
