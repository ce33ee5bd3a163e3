"""Streams of any device under fairscale's names (``fairscale.nn.pipe.stream``), from torchgpipe (arXiv 2004.09910).

torch has all of it in ``torch.Stream`` and ``torch.accelerator``; what is added is a host that stands for a device
with one stream, on which all work is done when a call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import cast

import torch


class CPUStreamType:
    """The class of :data:`CPUStream`."""


CPUStream = CPUStreamType()
"""The host's only stream."""

AbstractStream = torch.Stream | CPUStreamType


def new_stream(device: torch.device) -> AbstractStream:
    """A new stream of a device; the host's is always the same."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """The stream on which work for that device is issued."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def default_stream(device: torch.device) -> AbstractStream:
    """The stream on which work is issued where nobody chose another."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).default_stream(device)


@contextlib.contextmanager
def use_device(device: torch.device) -> Generator[None]:
    """Within this block new tensors of the device's type lie on this one of them."""
    with contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        yield


@contextlib.contextmanager
def use_stream(stream: AbstractStream | None) -> Generator[None]:
    """Within this block work is issued on that stream (None and the host's: nothing changes)."""
    if isinstance(stream, torch.Stream):
        with torch.get_device_module(stream.device).stream(stream):
            yield
    else:
        yield


def get_device(stream: AbstractStream) -> torch.device:
    """The device that a stream belongs to."""
    return as_cuda(stream).device if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Makes what is issued on ``source`` from now on come after what ``target`` has been given so far."""
    if is_cuda(target):
        if is_cuda(source):
            as_cuda(source).wait_stream(as_cuda(target))
        else:  # the host itself
            as_cuda(target).synchronize()


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """A tensor's memory is not given away before what that stream has been given so far is done."""
    if is_cuda(stream):
        # A view's offset hides the storage's begin, which is what the allocator knows.
        tensor.new_empty(0).set_(tensor.untyped_storage()).record_stream(as_cuda(stream))


def is_cuda(stream: AbstractStream | None) -> bool:
    """Whether it is a device's stream (any device's, in spite of the name), not the host's."""
    return isinstance(stream, torch.Stream)


def as_cuda(stream: AbstractStream) -> torch.Stream:
    """The same stream, for type checkers: a device's."""
    return cast("torch.Stream", stream)
