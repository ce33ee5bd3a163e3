"""Where an optimizer's parameters are updated: on their owners, in flat segments, or on every rank."""

from .choosing import placement_for

__all__ = ["placement_for"]
