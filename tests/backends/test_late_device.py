"""Devices that torch knows through PrivateUse1: one that shardkit has no class for, and one under TorchTPU's rules.

Their streams complete late: what is not waited for has old values (see tests/late_device).
"""

from __future__ import annotations

import pytest

from tests.backends import cuda_programs as programs
from tests.backends.environments import environments, family
from tests.pools import rank_pool

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
