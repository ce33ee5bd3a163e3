"""What one CUDA device shows: two ranks on it, and facts about memory, waiting, errors and the end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardkit.backends.processes import RankPool
from tests.backends import contract_programs
from tests.backends import cuda_programs as programs
from tests.pools import rank_pool

needs_a_device = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
# The programs themselves are tried without one, too.
GLOO = "one device over gloo"
libraries = pytest.mark.parametrize(
    ("backend", "pool"),
    [
        pytest.param("gloo", GLOO, id="trial"),
        pytest.param("cuda", GLOO, id="gloo", marks=needs_a_device),
        pytest.param("cuda", "one device over nccl", id="nccl", marks=needs_a_device),
    ],
)
alone = pytest.mark.parametrize("program", [pytest.param(p, marks=needs_a_device, id=p.__name__) for p in (
    programs.memory_when_the_host_runs_ahead, programs.offloaded_shards, programs.moved_after_wrapping,
    programs.a_step_without_host_synchronization, programs.scaled_checkpointed_compiled,
)])  # fmt: skip


@pytest.mark.parametrize("program", contract_programs.CONTRACT, ids=lambda program: program.__name__)
@pytest.mark.parametrize("over", [pytest.param(n, marks=needs_a_device) for n in ("gloo", "nccl")])
def test_contract(over: str, program: Callable[..., Any]) -> None:
    rank_pool(2, f"one device over {over}").run(program, "cuda")


@libraries
@pytest.mark.parametrize("options", programs.OPTIONS)
# one shard in a unit, and several that travel together
@pytest.mark.parametrize("name", ["tied_across", "adapted"])
def test_fsdp(backend: str, pool: str, name: str, options: str) -> None:
    rank_pool(2, pool).run(programs.train_fsdp, 2, name, options, backend)


@libraries
def test_sharded_ddp(backend: str, pool: str) -> None:
    rank_pool(2, pool).run(programs.train_sharded_ddp, backend)


@libraries
def test_ranks_that_differ(backend: str, pool: str) -> None:
    rank_pool(2, pool).run(programs.one_rank_leaves_a_parameter_out, backend)
    rank_pool(2, pool).run(programs.a_late_rank, 0.1 if backend == "gloo" else 3.0, backend)


@alone
def test_alone(program: Callable[..., Any]) -> None:
    rank_pool(1, "cuda").run(program)


@pytest.mark.parametrize(
    "options", [pytest.param(n, marks=needs_a_device) for n in ("plain", "two ahead", "offloaded")]
)
def test_nothing_is_unordered(options: str) -> None:
    with RankPool(2, "cuda", start=programs.sanitized, timeout=400) as pool:
        pool.run(programs.train_fsdp, 2, "tied_across", options)


_PROGRAM = """
import tempfile, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
from shardkit.backend import get_backend
group = get_backend("cuda").group()
for name in ("parameters", "gradients", "control"):
    group.channel(name).all_reduce(torch.ones(4, device="cuda"))
torch.cuda.synchronize()
{end}
print("done")
"""


@pytest.mark.parametrize(
    ("level", "end"),
    [
        pytest.param(level, end, marks=needs_a_device)
        for level in ("OFF", "INFO", "DETAIL")
        for end in ("dist.destroy_process_group()", "")
    ],
)
def test_end_of_a_program(level: str, end: str) -> None:
    """It comes, and warns of none of our groups."""
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": level}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(end=end)],
        capture_output=True, text=True, timeout=400, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr
    if end:
        assert "destroy_process_group() was not called" not in done.stderr
