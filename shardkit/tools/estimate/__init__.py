"""Estimates what a training would take, without any memory: the real wrapping and a real step, on meta tensors."""

from .devices import DEVICES, Device, device_named
from .experiments import from_experiment, from_hugging_face
from .stepping import Estimate, estimate, smallest_ranks
from .strategies import STRATEGIES, Subject

__all__ = [
    "DEVICES", "STRATEGIES", "Device", "Estimate", "Subject", "device_named", "estimate", "from_experiment",
    "from_hugging_face", "smallest_ranks",
]  # fmt: skip
