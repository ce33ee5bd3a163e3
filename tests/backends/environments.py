"""The backends and world sizes that the contract is checked on."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.late_device.build import missing as obstacle
from tests.torch_tpu.runtime import missing as no_torch_tpu

WORLD_SIZES = {
    "gloo": (1, 2, 3, 4),
    "simulated": (1, 2, 3, 4),
    "streams": (1, 3),
    "late": (2,),
    "tpu": (2,),
    "torch_tpu": (1, 2),
    "cuda": (1, 2, 4),
    "xla": (2, 4),
}


def _marks(backend: str, world_size: int) -> list[Any]:
    if backend == "cuda":
        missing = torch.cuda.device_count() < world_size
        return [pytest.mark.cuda, pytest.mark.skipif(missing, reason=f"needs {world_size} CUDA devices")]
    if backend in ("late", "tpu"):
        return [pytest.mark.skipif(bool(obstacle()), reason=f"the device can't be compiled: {obstacle()}")]
    if backend == "torch_tpu":
        return [pytest.mark.skipif(bool(no_torch_tpu()), reason=no_torch_tpu())]
    if backend == "xla":
        missing = importlib.util.find_spec("torch_xla") is None
        return [pytest.mark.xla, pytest.mark.skipif(missing, reason="needs torch_xla")]
    return []


def environments(*names: str) -> list[Any]:
    """Parameters (backend, world_size) for pytest; all backends by default."""
    return [
        pytest.param(name, size, id=f"{name}{size}", marks=_marks(name, size))
        for name in names or WORLD_SIZES
        for size in WORLD_SIZES[name]
    ]


def family(name: str) -> str:
    """The backend of an environment."""
    return "tpu" if name == "torch_tpu" else name
