"""One suite for all backends: what :mod:`shardkit.backend` promises, on real ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
import shardkit.backend as registry
from shardkit.backend import Backend, Group, backend_for, backend_for_device, get_backend
from shardkit.errors import BackendError, ConfigurationError
from tests.backends import contract_programs as programs
from tests.backends.environments import environments, family
from tests.pools import rank_pool

everywhere = pytest.mark.parametrize(("backend", "world_size"), environments())


@everywhere
@pytest.mark.parametrize(
    "program",
    programs.CONTRACT,
    ids=lambda program: program.__name__,
)
def test_contract(backend: str, world_size: int, program: Callable[..., Any]) -> None:
    rank_pool(world_size, backend).run(program, family(backend))


FOUR = [p for p in environments("gloo", "simulated", "cuda") if p.values[1] == 4]


@pytest.mark.parametrize(("backend", "world_size"), FOUR)
def test_groups_in_groups(backend: str, world_size: int) -> None:
    rank_pool(world_size, backend).run(programs.nested_groups, backend)


# ------------------------------------------------------------------ without ranks
@pytest.mark.parametrize("name", ["gloo", "simulated", "cuda"])
def test_no_group_without_ranks(name: str) -> None:
    backend = get_backend(name)
    with pytest.raises(ConfigurationError, match=r"shardkit\.launch"):
        backend.group()
    assert get_backend(name) is backend


def test_cuda_has_the_protocols_methods() -> None:
    from shardkit.backends.cuda import CudaBackend, NcclGroup

    programs.check_signatures(CudaBackend, Backend)
    programs.check_signatures(NcclGroup, Group)


def test_another_accelerator_is_one_class() -> None:
    from shardkit.backends.accelerator import AcceleratorBackend

    class XpuBackend(AcceleratorBackend):
        name = device_type = "xpu"
        process_group_backend = "xccl"

    backend = XpuBackend()
    programs.check_signatures(XpuBackend, Backend)
    if not backend.is_available():
        with pytest.raises(
            BackendError, match=r"no XPU device is available \(torch.xpu.is_available\(\) is False\)"
        ):
            backend.device()


def test_unknown_names_and_devices() -> None:
    with pytest.raises(
        BackendError, match="no backend named 'nccl'; there are: gloo, cuda, tpu, xla, simulated"
    ):
        get_backend("nccl")
    with pytest.raises(BackendError, match="no backend serves tensors on 'vulkan'"):
        backend_for_device("vulkan")
    assert backend_for([torch.empty(1, device="meta")]).name == "gloo"
    assert backend_for([]).name == "gloo"
    assert backend_for([torch.empty(1)], "simulated") is get_backend("simulated")
    assert backend_for([torch.empty(1)], get_backend("cuda")) is get_backend("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    with pytest.raises(BackendError, match="'cuda' is not available on this machine"):
        shardkit.launch(programs.device, 2, backend="cuda", args=("cuda",))
    with pytest.raises(BackendError, match="CUDA"):
        get_backend("cuda").device()


# ------------------------------------------------------------------ third parties
_THIRD_PARTY = """
from shardkit.backends.simulated import SimulatedBackend

class Backend(SimulatedBackend):
    name = "thirdparty"
    device_type = "vulkan"

def make():
    return Backend()
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution that brings a backend."""
    (tmp_path / "shardkit_thirdparty.py").write_text(_THIRD_PARTY)
    info = tmp_path / "shardkit_thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardkit-thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardkit.backends]\nthirdparty = shardkit_thirdparty:make\n")
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("shardkit_thirdparty", None)


@pytest.mark.usefixtures("third_party")
def test_installed_packages_add_backends() -> None:
    backend = get_backend("thirdparty")
    assert backend.device_type == "vulkan"
    assert backend_for_device("vulkan") is backend
    ranks = shardkit.launch(_ranks_of, 3, backend="thirdparty", args=("thirdparty",))
    assert ranks == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(BackendError, match="there are: gloo, cuda, tpu, xla, simulated, thirdparty"):
        get_backend("unknown")


def _ranks_of(rank: int, backend: str) -> tuple[int, int]:
    group = get_backend(backend).group()
    return group.rank, group.world_size
