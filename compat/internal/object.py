"""fairscale.internal.object: Python objects as byte tensors."""

from shardkit.extra.objects import pyobject_to_tensor, tensor_to_pyobject

__all__ = ["pyobject_to_tensor", "tensor_to_pyobject"]
