"""Streams under fairscale's names: the host's only one, and a device's where there is one."""

from __future__ import annotations

import pytest
import torch

from shardkit.nn.pipe.stream import (
    CPUStream,
    current_stream,
    default_stream,
    get_device,
    is_cuda,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

HOST = torch.device("cpu")


@pytest.mark.parametrize("made", [new_stream, current_stream, default_stream])
def test_the_host_has_one(made: object) -> None:
    assert made(HOST) is CPUStream  # type: ignore[operator]
    assert get_device(CPUStream) == HOST
    assert not is_cuda(CPUStream)
    assert not is_cuda(None)


def test_nothing_is_waited_for_on_the_host() -> None:
    with use_device(HOST), use_stream(CPUStream), use_stream(None):
        x = torch.ones(3)
    wait_stream(CPUStream, CPUStream)
    record_stream(x, CPUStream)
    assert x.sum() == 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_many() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    stream = new_stream(device)
    assert is_cuda(stream)
    assert get_device(stream) == device
    assert stream != default_stream(device)
    with use_device(device):
        assert torch.ones(1, device="cuda").device == device
    with use_stream(stream):
        assert current_stream(device) == stream
        torch.cuda._sleep(50_000_000)
        x = torch.ones(100, 100, device=device)
    wait_stream(current_stream(device), stream)
    assert x.sum().item() == 10_000
    record_stream(x[1:], stream)
    wait_stream(CPUStream, stream)
    assert current_stream(device) == default_stream(device)
