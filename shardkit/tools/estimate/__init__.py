"""Estimates what a training would take, without any memory: the real wrapping and a real step, on meta tensors."""

from .devices import DEVICES, Device, device_named
from .stepping import Estimate, estimate, smallest_ranks
from .subjects import STRATEGIES, Subject, from_experiment, from_hugging_face, with_adapters

__all__ = [
    "DEVICES",
    "STRATEGIES",
    "Device",
    "Estimate",
    "Subject",
    "device_named",
    "estimate",
    "from_experiment",
    "from_hugging_face",
    "smallest_ranks",
    "with_adapters",
]
