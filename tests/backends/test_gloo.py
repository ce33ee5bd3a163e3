"""What gloo groups take besides plain tensors of the usual dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkit.backend import ReduceOp, get_backend
from shardkit.backends.c10d.group import C10dWork
from shardkit.errors import ConfigurationError
from tests.pools import rank_pool


def _other_dtypes(rank: int) -> None:
    """Buffers of a module may have any dtype: masks are bool."""
    group = get_backend("gloo").group()
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.int8):
        tensor = torch.tensor([[0, 1, 1], [0, 0, 1]]) if rank == 1 else torch.zeros(2, 3)
        tensor = tensor.to(dtype)
        group.broadcast(tensor, 1, async_op=True).wait()
        assert tensor.to(torch.float32 if not dtype.is_complex else dtype).real.tolist() == [
            [0, 1, 1],
            [0, 0, 1],
        ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_is_broadcast(world_size: int) -> None:
    rank_pool(world_size).run(_other_dtypes)


def _parameters(rank: int) -> None:
    """Tensors that require gradients are used as what they hold; nothing is recorded."""
    group = get_backend("gloo").group()
    world = group.world_size
    parameter = torch.nn.Parameter(torch.full((2 * world,), float(rank)))
    output, shard = torch.zeros(2 * world), torch.zeros(2)
    group.all_gather_into(output, parameter[2 * rank : 2 * rank + 2])
    assert output.tolist() == [float(r) for r in range(world) for _ in range(2)]
    group.reduce_scatter_into(shard, parameter, op=ReduceOp.SUM)
    assert shard.tolist() == [sum(range(world))] * 2
    group.all_reduce(parameter, op=ReduceOp.MAX)
    group.broadcast(parameter, 0)
    assert parameter.tolist() == [world - 1.0] * (2 * world)
    for tensor in (output, shard):
        assert not tensor.requires_grad
    assert parameter.requires_grad
    assert parameter.is_leaf


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters(world_size: int) -> None:
    rank_pool(world_size).run(_parameters)


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("no, thanks")


def _bad_objects(rank: int) -> None:
    group = get_backend("gloo").group()
    bad = group.world_size - 1
    mine = _Unpicklable() if rank == bad else 1
    for call in (
        lambda: group.all_gather_object(mine),
        lambda: group.gather_object(mine, 0),
        lambda: group.broadcast_object(mine, bad),
    ):
        with pytest.raises(ConfigurationError, match=rf"ranks \[{bad}\] can't be pickled"):
            call()
    assert group.all_gather_object(rank) == list(range(bad + 1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_object_that_cant_be_pickled_is_an_error_on_all_ranks(world_size: int) -> None:
    rank_pool(world_size).run(_bad_objects)


class _SaysLate:
    """A work of torch's that comes through between the end of its slice of time and the question whether it did."""

    def __init__(self, work: Any) -> None:
        self._work, self._waits = work, 0

    def wait(self, timeout: Any = None) -> Any:
        self._waits += 1
        if self._waits > 1:
            return self._work.wait()
        self._work.wait()
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _late(rank: int) -> None:
    group: Any = get_backend("gloo").group().channel("late")
    tensor = torch.ones(3)
    work = group.process_group.allreduce([tensor])
    C10dWork(group, [_SaysLate(work)], ("late", 1, "all_reduce", 3, ""), None).wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_a_work_that_comes_through_as_its_slice_of_time_ends() -> None:
    rank_pool(2).run(_late)
