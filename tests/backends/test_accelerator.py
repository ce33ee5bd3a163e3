"""Which device a rank takes, where something like torch.accelerator stands for a machine with some devices."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
import shardkit.backend as registry
from shardkit.backend import backend_for, backend_of_job
from shardkit.backends.cuda import CudaBackend
from shardkit.errors import ConfigurationError
from shardkit.nn.data_parallel import device_for


class _Machine:
    """Stands for torch.accelerator on a machine with some devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, current: int = 0) -> None:
        self.current = current
        self.synchronized: list[torch.device] = []
        for name, function in {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "device_count": lambda: devices,
            "current_device_index": lambda: self.current,
            "set_device_index": self.set_device,
            "synchronize": self.synchronized.append,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)

    def set_device(self, device: int) -> None:
        self.current = device


class _On:
    """A tensor on a device that is not there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("local_rank", "devices", "current", "parameters", "expected"),
    [
        (None, 4, 0, None, 0),
        (2, 4, 0, None, 2),
        (2, 4, 3, None, 3),  # the caller's choice
        (2, 1, 0, None, 0),  # CUDA_VISIBLE_DEVICES shows each process its own
        (None, 4, 0, "cuda:3", 3),  # model.to(rank), and no set_device
        (2, 4, 0, "cuda:3", 3),
        (None, 4, 2, "cuda:3", 2),
        (2, 4, 0, "cuda:0", 0),  # the model is there, whatever LOCAL_RANK says
    ],
)
def test_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int | None, devices: int, current: int, parameters: str | None,
    expected: int,
) -> None:  # fmt: skip
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    machine, backend = _Machine(monkeypatch, devices, current), CudaBackend()
    monkeypatch.setattr(registry, "_instances", {"cuda": backend})
    if parameters is not None:
        tensors: Any = [_On(parameters)]
        assert backend_for(tensors) is backend
        assert backend_for(tensors, backend) is backend
    assert backend.device() == torch.device("cuda", expected)
    backend.synchronize()
    assert machine.synchronized == [torch.device("cuda", expected)]
    machine.set_device(devices - 1)  # later, by the caller: it is followed
    assert backend.device() == torch.device("cuda", devices - 1)
    backend.settle(torch.device("cuda", 0))
    assert backend.device() == torch.device("cuda", devices - 1)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    _Machine(monkeypatch, 2)
    with pytest.raises(ConfigurationError, match="LOCAL_RANK is 2, but only 2 CUDA devices are visible"):
        CudaBackend().device()


def test_launched_ranks_have_a_group_for_the_host_too() -> None:
    """torch's dcp.async_save needs one."""
    library = dist.Backend(CudaBackend.process_group_backend)
    served = dist.distributed_c10d.BackendConfig(library).get_device_backend_map()
    assert served == {"cpu": "gloo", "cuda": "nccl"}


def test_offloaded_modules_are_computed_on_the_device_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fairscale does it for ``FullyShardedDataParallel(module, move_params_to_cpu=True)``."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    _Machine(monkeypatch, 4, 3)
    monkeypatch.setattr(registry, "_instances", {"cuda": CudaBackend(), "gloo": registry.get_backend("gloo")})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    module, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    for serves, expected in (("cuda:nccl", torch.device("cuda", 3)), ("cpu:gloo", None)):
        monkeypatch.setattr(dist, "get_backend_config", lambda serves=serves: serves)
        assert device_for(module.parameters(), None, True) == expected
        assert device_for(module.parameters(), None, False) is None
        assert device_for(meta.parameters(), None, True) is None
        assert device_for(module.parameters(), torch.device("cpu"), True) == torch.device("cpu")


def test_hybrid_groups_are_of_the_device_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    _Machine(monkeypatch, 4, 3)
    backend = CudaBackend()
    asked: list[object] = []

    def group(process_group: object) -> object:
        asked.append(process_group)
        raise LookupError("the device's")

    monkeypatch.setattr(backend, "group", group)
    monkeypatch.setattr(registry, "_instances", {"cuda": backend})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(LookupError):
        shardkit.hybrid_groups(2)
    assert asked == [None]


@pytest.mark.parametrize(
    ("serves", "name"),
    [
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo,mps:gloo", "gloo"),
        ("cpu:gloo", "gloo"),
        ("cpu:gloo,hpu:hccl", "gloo"),
        (None, "gloo"),
    ],
)
def test_backend_of_what_has_no_tensors(serves: str | None, name: str) -> None:
    with (
        mock.patch.object(dist, "is_initialized", return_value=serves is not None),
        mock.patch.object(dist, "get_backend_config", return_value=serves),
    ):
        assert backend_of_job().name == name
