"""The path of :mod:`shardkit.internal.version` up to fairscale 0.4.6."""

from shardkit.internal.version import torch_version

__all__ = ["torch_version"]
