"""fairscale.internal."""

import re

import torch

__all__ = ["torch_version"]


def torch_version(version: str = torch.__version__) -> tuple[int, ...]:
    """Returns ``"2.9.0+cpu"`` as ``(2, 9, 0)``; empty if it is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(n) for n in match.groups()) if match else ()
