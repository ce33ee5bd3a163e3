"""What only CUDA devices can show; the contract suite covers the rest."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shardkit.backend import ReduceOp, get_backend
from shardkit.backends.processes import RankPool
from tests.backends import cuda_programs as programs
from tests.pools import on_ranks, rank_pool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


def _devices(rank: int) -> tuple[int, str | None]:
    return torch.cuda.current_device(), str(get_backend("cuda").device())


def test_every_rank_has_its_device() -> None:
    assert rank_pool(2, "cuda").run(_devices) == [(0, "cuda:0"), (1, "cuda:1")]


@on_ranks((2, "cuda"))
def test_gloo_and_mixed_groups_carry_cuda_tensors(rank: int) -> None:
    backend = get_backend("cuda")
    for kind in ("gloo", "nccl", "cpu:gloo,cuda:nccl"):
        group = backend.group(dist.new_group([0, 1], backend=kind))
        tensor = torch.full((4,), float(rank), device=backend.device())
        group.all_reduce(tensor, op=ReduceOp.AVG)
        assert tensor.tolist() == [0.5] * 4
        output = torch.zeros(5, device=backend.device())
        group.all_gather_into(output, torch.full((2 + rank,), float(rank), device=backend.device()), [2, 3])
        assert output.tolist() == [0, 0, 1, 1, 1]
        shard = torch.zeros(2 + rank, device=backend.device())
        group.reduce_scatter_into(shard, torch.ones(5, device=backend.device()), [2, 3])
        assert shard.tolist() == [2.0] * (2 + rank)
        assert group.all_gather_object(rank) == [0, 1]


@on_ranks((2, "cuda"))
def test_waiting_does_not_block_the_host(rank: int) -> None:
    backend = get_backend("cuda")
    group = backend.group()
    tensor = torch.ones(1000, device=backend.device())
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    group.all_reduce(tensor, async_op=True).wait()
    issued = time.monotonic() - began
    assert tensor.tolist() == [4.0] * 1000
    assert time.monotonic() - began > 2 * issued
    assert issued < 0.3


def test_training_equals_one_process() -> None:
    rank_pool(2, "cuda").run(programs.train_sharded_ddp)


def test_one_rank_leaves_a_parameter_out() -> None:
    rank_pool(2, "cuda").run(programs.one_rank_leaves_a_parameter_out)


def test_a_late_rank() -> None:
    rank_pool(2, "cuda").run(programs.a_late_rank, 5.0)


def test_nobody_has_set_a_device() -> None:
    with RankPool(2, "cuda", start=programs.without_a_device, timeout=400) as pool:
        assert pool.run(programs.as_in_the_tutorial) == ["cuda:0", "cuda:1"]
