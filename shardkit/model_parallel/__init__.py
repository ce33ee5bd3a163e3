"""Layers split over ranks (tensor parallelism): fairscale's names, on any device that a process group carries."""

from . import groups, layers
from .groups import *  # noqa: F403
from .layers import *  # noqa: F403

__all__ = [*groups.__all__, *layers.__all__]
