"""A device with streams that exists in its rules alone: what CUDA and NCCL leave to the caller, checked on the CPU."""

from .backend import StreamsBackend, StreamsOverGloo
from .device import Device, current_device
from .group import StreamsGroup

__all__ = ["Device", "StreamsBackend", "StreamsGroup", "StreamsOverGloo", "current_device"]
