"""The path of :mod:`shardkit.internal.params` up to fairscale 0.4.6."""

from shardkit.internal.params import (
    Workhandle,
    calc_grad_norm,
    get_global_rank,
    recursive_copy_to_device,
)

__all__ = [
    "Workhandle",
    "calc_grad_norm",
    "get_global_rank",
    "recursive_copy_to_device",
]
