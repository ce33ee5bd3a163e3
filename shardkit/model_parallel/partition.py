"""How sizes, vocabularies and tensors are cut into equal parts."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError


class PartitionError(ConfigurationError):
    """Sizes that can't be cut into equal parts."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Checks that parts have equal size.

    Raises:
        PartitionError: they have not.
    """
    if numerator % denominator:
        raise PartitionError(
            f"{numerator} is not divisible by {denominator}: parts would have different sizes; choose a size that is "
            f"a multiple of {denominator} (such as {-(-numerator // denominator) * denominator}), or fewer ranks"
        )


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """The size of a part.

    Raises:
        PartitionError: parts would have different sizes.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """[..., n] -> ``num_partitions`` views [..., n / num_partitions].

    Args:
        tensor: at least one dimension.
        num_partitions: divides the last dimension.
        contiguous_split_chunks: copies in place of views where these are not contiguous.

    Raises:
        PartitionError: ``num_partitions`` does not divide the last dimension.
    """
    parts = torch.split(tensor, divide_and_check_no_remainder(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() if contiguous_split_chunks else part for part in parts)


class VocabUtility:
    """Which part [first, last) of a vocabulary is a rank's."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """By the size of a part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """By the size of the whole.

        Raises:
            PartitionError: ``world_size`` does not divide the vocabulary.
        """
        size = divide_and_check_no_remainder(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
