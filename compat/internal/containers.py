"""fairscale.internal.containers."""

from shardkit.extra.containers import (
    apply_to_tensors,
    apply_to_type,
    from_np,
    pack_kwargs,
    split_non_tensors,
    to_np,
    unpack_kwargs,
    unpack_non_tensors,
)

__all__ = [
    "apply_to_tensors",
    "apply_to_type",
    "from_np",
    "pack_kwargs",
    "split_non_tensors",
    "to_np",
    "unpack_kwargs",
    "unpack_non_tensors",
]
