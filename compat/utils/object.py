"""The path of :mod:`shardkit.internal.object` up to fairscale 0.4.6."""

from shardkit.internal.object import (
    pyobject_to_tensor,
    tensor_to_pyobject,
)

__all__ = [
    "pyobject_to_tensor",
    "tensor_to_pyobject",
]
