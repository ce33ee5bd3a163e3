"""Ranks as threads of one process that take turns."""

from .backend import SimulatedBackend
from .group import SimulatedGroup

__all__ = ["SimulatedBackend", "SimulatedGroup"]
