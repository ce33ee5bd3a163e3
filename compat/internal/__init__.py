"""fairscale.internal."""

from .version import torch_version

__all__ = ["torch_version"]
