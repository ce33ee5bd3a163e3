"""fairscale.nn.model_parallel.utils."""

from shardkit.model_parallel.groups import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)

__all__ = [
    "VocabUtility",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
]
