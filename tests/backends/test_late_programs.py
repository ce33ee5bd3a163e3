"""Users' programs on devices that torch knows through PrivateUse1: scaling, OSS, checkpoints, offload, skipped batches.

The numbers are the CPU's, on as many ranks. torch_tpu itself: see tests/torch_tpu.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import late_programs as programs
from tests.backends.environments import environments, family
from tests.pools import rank_pool

everywhere = pytest.mark.parametrize(
    ("backend", "world_size"), [e for e in environments("late", "tpu", "torch_tpu") if e.values[1] > 1]
)


def _compare(backend: str, program: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> None:
    host = args and tuple(f"{a}/host" for a in args)
    expected = rank_pool(2, "gloo").run(program, "gloo", *host)
    found = rank_pool(2, backend).run(program, family(backend), *args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@everywhere
def test_loss_scaling_under_autocast(backend: str, world_size: int) -> None:
    _compare(backend, programs.scaled, tolerance=2e-2)


@everywhere
@pytest.mark.parametrize("program", [programs.sharded_optimizer, programs.out_of_memory])
def test_numbers_of_the_cpu(backend: str, world_size: int, program: Callable[..., Any]) -> None:
    _compare(backend, program)


@everywhere
def test_on_the_host(backend: str, world_size: int) -> None:
    if backend == "torch_tpu":
        pytest.skip("XLA's plugin for CPUs has no pinned memory, which torch_tpu's copies to the host take")
    _compare(backend, programs.offloaded)
    _compare(backend, programs.frozen_on_the_host)


@everywhere
def test_checkpoints(backend: str, world_size: int, tmp_path: Path) -> None:
    _compare(backend, programs.saved, str(tmp_path))


@everywhere
def test_the_example_goes_on_after_a_restart(backend: str, world_size: int, tmp_path: Path) -> None:
    if backend == "torch_tpu":
        pytest.skip("its attention is a program for TPUs alone (tpu_custom_call)")
    rank_pool(world_size, backend).run(programs.anything, family(backend), str(tmp_path))
