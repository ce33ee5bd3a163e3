"""Devices that torch knows through PrivateUse1: one that shardkit has no class for, and one under TorchTPU's rules.

Their streams complete late: what is not waited for has old values (see tests/late_device).
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

from shardkit import FSDP
from shardkit.backend import get_backend
from shardkit.errors import OutOfStepError
from tests.backends import cuda_programs as programs
from tests.backends.environments import environments, family
from tests.late_device import ranks
from tests.late_device.build import missing
from tests.pools import ForkedPool, rank_pool

everywhere = pytest.mark.parametrize(
    ("backend", "world_size"), [e for e in environments("late", "tpu", "torch_tpu") if e.values[1] > 1]
)


@everywhere
@pytest.mark.parametrize("options", programs.OPTIONS)
def test_fsdp_trains_as_one_process(backend: str, world_size: int, options: str) -> None:
    name = "checkpoint_reentrant" if options == "kept" else "tied_across"
    rank_pool(world_size, backend).run(programs.train_fsdp, world_size, name, options, family(backend))


@everywhere
def test_sharded_ddp_trains_as_one_process(backend: str, world_size: int) -> None:
    rank_pool(world_size, backend).run(programs.train_sharded_ddp, family(backend))


@everywhere
def test_ranks_that_differ(backend: str, world_size: int) -> None:
    rank_pool(world_size, backend).run(programs.one_rank_leaves_a_parameter_out, family(backend))
    rank_pool(world_size, backend).run(programs.a_late_rank, 0.1, family(backend))


def _in_another_order(rank: int, backend: str) -> str:
    device = get_backend(backend).device()
    torch.manual_seed(0)
    first, second = (FSDP(nn.Linear(6, 6).to(device)) for _ in range(2))
    try:
        for step in range(1500):
            swapped = step > 3 and rank == 1
            for model in (second, first) if swapped else (first, second):
                model(torch.ones(1, 6, device=device)).sum().backward()  # nothing that the host waits for
            time.sleep(0.02)
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(missing()), reason="the device can't be compiled")
def test_roots_of_equal_shapes_in_another_order() -> None:
    """Nothing waits on the host here, where ranks could notice that they are in different calls."""
    pool = ForkedPool(2, "late", start=ranks.start_late)
    try:
        for end in pool.run(_in_another_order, "late"):
            assert {f"parameters 0 of the root, unit {number}" for number in (1, 2)} <= set(
                re.findall("parameters 0 of the root, unit .", end)
            ), end
    finally:
        pool.close(kill=True)  # the device waits for a collective that will not come to its end
