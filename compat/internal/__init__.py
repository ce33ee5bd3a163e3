"""fairscale.internal."""

import re

import torch

from shardkit.compat.redirected import redirected_names

__all__ = ["torch_version"]

__getattr__ = redirected_names(__name__)


def torch_version(version: str = torch.__version__) -> tuple[int, ...]:
    """``"2.9.0+cpu"`` as ``(2, 9, 0)``; empty if it is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(n) for n in match.groups()) if match else ()
