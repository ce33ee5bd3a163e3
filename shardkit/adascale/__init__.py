"""Learning rates for large batches (AdaScale)."""

from .optimizer import AdaScale

__all__ = ["AdaScale"]
