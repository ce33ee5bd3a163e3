"""What ranks on TPUs have to find in their environment; their trainings are those of test_late_device.py."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch

from shardkit.backends import tpu
from shardkit.backends.accelerator import of_torch
from shardkit.errors import BackendError, ConfigurationError


def _says(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> list[Any]:
    asked = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(tpu.subprocess, "run", run)
    return asked


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_get_what_torch_tpu_says(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank too: its process group wants to know."""
    variables = {tpu.ADDRESSES: "localhost:1,localhost:2", tpu.TOPOLOGY: "1,2,1"}
    asked = _says(monkeypatch, f"libtpu not found.\n{tpu._TELL}{json.dumps(variables)}\n")
    assert tpu.TpuBackend()._environment_of_ranks(ranks) == variables
    assert asked == [str(ranks)]


def test_a_number_without_a_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    _says(monkeypatch, "", "Traceback\nRuntimeError: No TPU topology found for count: 3\n")
    with pytest.raises(BackendError, match=r"can't arrange 3 ranks .* No TPU topology found for count: 3"):
        tpu.TpuBackend()._environment_of_ranks(3)


@pytest.mark.parametrize("unset", [(tpu.ADDRESSES,), (tpu.TOPOLOGY,), (tpu.ADDRESSES, tpu.TOPOLOGY)])
def test_ranks_that_lack_it_are_refused(unset: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tpu.ADDRESSES, tpu.TOPOLOGY):
        monkeypatch.setenv(name, "something")
    for name in unset:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=f"{' and '.join(unset)} is not set.*set -a; eval"):
        tpu.TpuBackend()._select_device()
    monkeypatch.setenv("WORLD_SIZE", "1")
    tpu.TpuBackend()._select_device()


def test_a_rank_that_has_taken_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' chips are there all the same: launch in such a rank is on TPUs."""
    monkeypatch.setattr(tpu.AcceleratorBackend, "device_count", lambda self: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv(tpu.ADDRESSES, raising=False)
    assert tpu.TpuBackend().device_count() == 1
    monkeypatch.setenv(tpu.ADDRESSES, "localhost:1,localhost:2,localhost:3,localhost:4")
    assert tpu.TpuBackend().device_count() == 4


def test_a_library_that_carries_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has "fake" for a device whose package is not there."""
    kinds = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    for library, serves in {"fake": False, "gloo": False, "hccl": True}.items():
        monkeypatch.setitem(kinds, "hpu", library)
        assert (of_torch("hpu") is not None) == serves
