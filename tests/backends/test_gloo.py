"""What gloo groups take besides plain tensors of the usual dtypes."""

from __future__ import annotations

import datetime
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.backend import DONE, ReduceOp, get_backend
from shardkit.backends.accelerator import StreamGroup, StreamWork
from shardkit.backends.c10d.group import C10dGroup, C10dWork
from shardkit.backends.processes import RankPool
from shardkit.errors import ConfigurationError, LifecycleError
from tests.doors import through
from tests.pools import ForkedPool, free_port, on_ranks
from tests.started import output_of, program


@on_ranks(2, 3)
def test_every_dtype_is_broadcast(rank: int) -> None:
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


@on_ranks(2, 3)
def test_every_dtype_is_gathered(rank: int, world_size: int) -> None:
    """Frozen weights may have any."""
    group = get_backend("gloo").group()
    for dtype in (
        torch.bool,
        torch.int16,
        torch.uint16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.bfloat16,
    ):
        for parts in ([2] * world_size, [3, *[1] * (world_size - 1)], [0, *[2] * (world_size - 1)]):
            whole = (torch.arange(sum(parts)) % 2).to(dtype)
            output = torch.zeros(sum(parts)).to(dtype)
            begin = sum(parts[:rank])
            own = whole[begin : begin + parts[rank]].clone()
            group.all_gather_into(output, own, None if len({*parts}) == 1 else parts)
            assert output.to(torch.complex64).tolist() == whole.to(torch.complex64).tolist()


@on_ranks(1, 2, 3)
def test_parameters(rank: int) -> None:
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


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("no, thanks")


@on_ranks(1, 2, 3)
def test_an_object_that_cant_be_pickled_is_an_error_on_all_ranks(rank: int) -> None:
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


@on_ranks(2)
def test_a_work_that_comes_through_as_its_slice_of_time_ends(rank: int) -> None:
    group: Any = get_backend("gloo").group().channel("late")
    tensor = torch.ones(3)
    work = group.process_group.allreduce([tensor])
    C10dWork(group, [_SaysLate(work)], ("late", 1, "all_reduce", 3, ""), None).wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


# ------------ What a process group costs a process, and that it is given back when torch destroys the group.
ROOT = Path(__file__).resolve().parents[2]
CYCLES = 40


def _held() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Ranks whose default group these tests may end."""
    with ForkedPool(2) as pool:
        yield pool


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@on_ranks(2)
def test_a_rank_that_waits_for_a_second_says_so(rank: int) -> None:
    """Others read it: until then no rank can hear that it is out of step."""
    group: Any = get_backend("gloo").group()
    before = group._watch._beat
    time.sleep(1.5 * rank)
    group.barrier()
    assert rank == 1 or group._watch._beat > before


@on_ranks(2)
def test_destroyed_groups_leave_nothing(rank: int) -> None:
    before = (0, 0)
    for cycle in range(CYCLES + 1):
        process_group = dist.new_group([0, 1])
        group = get_backend("gloo").group(process_group)
        part = group.new_group([0, 1])
        assert part is not None
        for one in (group.channel("gradients"), group.channel("control"), part, part.channel("control")):
            tensor = torch.ones(4)
            one.all_reduce(tensor)
            assert tensor[0] == 2
        dist.barrier()  # nothing is in flight any more
        dist.destroy_process_group(process_group)
        if cycle == 0:
            before = _held()
    until = time.monotonic() + 5  # threads of gloo's end a little later, on a busy machine
    while any(n > m + 4 for n, m in zip(_held(), before, strict=True)) and time.monotonic() < until:
        time.sleep(0.05)
    after = _held()
    assert after[0] <= before[0] + 4, (before, after)
    assert after[1] <= before[1] + 4, (before, after)


def _train(group: object = None) -> float:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = shardkit.OSS(model.parameters(), torch.optim.Adam, lr=0.1, group=group)
    wrapped = shardkit.ShardedDDP(model, optimizer, group=group)
    loss = wrapped(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _refused(*calls: Callable[[], object]) -> list[str]:
    said = []
    for call in calls:
        with pytest.raises((LifecycleError, ConfigurationError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def _begin_again(rank: int, port: int) -> list[str]:
    said = []
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, 2, rank == 0)
    for which in range(2):
        own = dist.PrefixStore(f"time {which}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
        group = get_backend("gloo").group()
        channel = group.channel("control")
        _train()
        dist.barrier()
        dist.destroy_process_group()
        said += _refused(channel.barrier, group.barrier, get_backend("gloo").group)
    return said


def test_a_new_default_group_after_the_first_was_destroyed(two: RankPool) -> None:
    for said in two.run(_begin_again, free_port()):
        assert len(said) == 2 * 3
        assert all("has been destroyed" in text or "no process group exists" in text for text in said), said


@on_ranks(2)
def test_a_destroyed_group_that_somebody_holds(rank: int) -> None:
    process_group = dist.new_group([0, 1])
    group = get_backend("gloo").group(process_group)
    channel = group.channel("control")
    channel.barrier()
    dist.destroy_process_group(process_group)
    said = _refused(channel.barrier, group.barrier, lambda: get_backend("gloo").group(process_group))
    assert ["destroyed" in text for text in said] == [True] * 3, said


@on_ranks(2)
def test_channels_have_the_timeout_of_the_process_group(rank: int) -> None:
    """As the channels' gloo has them."""
    process_group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=77))
    group = get_backend("gloo").group(process_group)
    part = group.new_group([0, 1])
    assert part is not None
    found = [g._timeout.total_seconds() for g in (group, group.channel("control"), part)]  # type: ignore[attr-defined]
    assert found == [77.0] * 3


MOST_SOCKETS = {2: 8, 4: 16, 8: 28}  # by world size; docs/MEASUREMENTS.md says so
SOCKETS = program("sockets_of_ranks")


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_sockets_of_a_rank(tmp_path: Path) -> None:
    """torch's own, those of the gradients, and for the other channels those that trees and rings use."""
    printed = output_of(SOCKETS, ",".join(map(str, MOST_SOCKETS)), str(tmp_path / "store"))
    counts: dict[int, list[int]] = {}
    for world_size, count in re.findall(r"of (\d+): (\d+)", printed):
        counts.setdefault(int(world_size), []).append(int(count))
    for world_size, most in MOST_SOCKETS.items():
        assert len(counts[world_size]) == world_size, printed
        assert max(counts[world_size]) <= most + 1, counts  # one may be about to close
        listeners = 5
        assert most <= 2 * (world_size - 1) + 6 * math.log2(world_size) + listeners


# ------------ How many communicators of its own a job makes: on NCCL each costs memory, two threads and time
# to connect.
class _Made:
    """The channels that are connected meanwhile, by name."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        self._meet = C10dGroup._meet

        def counted(group: Any, what: str, name: str, members: Any) -> Any:
            self.names[name.partition("/")[2]] += 1
            return self._meet(group, what, name, members)

        C10dGroup._meet = counted  # type: ignore[method-assign]
        return self.names

    def __exit__(self, *error: object) -> None:
        C10dGroup._meet = self._meet  # type: ignore[method-assign]


def _model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(*layers)


def _fsdp(group: Any) -> tuple[nn.Module, Any]:
    wrapped = through("FSDP", _model(), "0", "1", "2", group=group)
    return wrapped, torch.optim.Adam(wrapped.parameters())


def _fully_shard(group: Any) -> tuple[nn.Module, Any]:
    model = _model()
    for layer in model:
        shardkit.fully_shard(layer, group=group)
    shardkit.fully_shard(model, group=group)
    return model, torch.optim.Adam(model.parameters())


def _sharded_ddp(group: Any) -> tuple[nn.Module, Any]:
    model, optimizer = _oss(group)
    return shardkit.ShardedDDP(model, optimizer, group=group), optimizer


def _without_buffers(group: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(8, 8)
    optimizer = shardkit.OSS(model.parameters(), torch.optim.Adam, group=group)
    return shardkit.ShardedDDP(model, optimizer, group=group), optimizer


def _oss(group: Any) -> tuple[nn.Module, Any]:
    model = _model()
    return model, shardkit.OSS(model.parameters(), torch.optim.Adam, group=group)


@on_ranks(2)
def test_communicators_of_a_job(rank: int) -> None:
    """The numbers that docs/ARCHITECTURE.md gives."""
    found = {}
    for make in (_oss, _sharded_ddp, _without_buffers, _fsdp, _fully_shard):
        with _Made() as made:
            model, optimizer = make(dist.new_group([0, 1]))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).pow(2).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.state_dict()
        assert max(made.values()) == 1, made  # however many units there are
        found[make.__name__] = sorted(made)
    three = ["control", "gradients", "parameters"]
    assert found == {
        "_oss": ["control", "parameters"],
        "_sharded_ddp": ["buffers", *three],
        "_without_buffers": three,
        "_fsdp": three,
        "_fully_shard": three,
    }


# ------------ Groups for libraries that run on a device's streams, over gloo: what they issue needs no such device.
@on_ranks(2)
def test_collectives_on_streams(rank: int) -> None:
    group = StreamGroup(get_backend("gloo"), dist.group.WORLD, (0, 1), rank)
    assert group.all_reduce(torch.empty(0)) is DONE

    gathered = torch.zeros(4)
    work = group.all_gather_into(gathered, torch.full((2,), float(rank)), async_op=True)
    assert isinstance(work, StreamWork)
    work.wait()
    assert work.is_done()
    assert gathered.tolist() == [0, 0, 1, 1]

    part = torch.zeros(2)
    group.reduce_scatter_into(part, torch.arange(4.0))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]

    exchanged = torch.zeros(2)
    group.all_to_all(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert exchanged.tolist() == [rank, 10 + rank]

    for total in (torch.ones(2, 3), torch.ones(3, 2).t()):  # the second can't travel as it is
        group.all_reduce(total)
        assert total.tolist() == [[2, 2, 2], [2, 2, 2]]
    sent = torch.full((3, 2), float(rank)).t()
    group.broadcast(sent, 1)
    assert sent.unique().tolist() == [1]
    reduced = torch.full((3, 2), rank + 1.0).t()
    group.reduce(reduced, 0)
    assert rank == 1 or reduced.unique().tolist() == [3]

    assert group.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert group.gather_object(rank, 1) == (None if rank == 0 else [0, 1])
    assert group.broadcast_object("a" if rank == 0 else None, 0) == "a"


@on_ranks(2)
def test_other_dtypes(rank: int) -> None:
    """What the library has no name for travels as bytes, complex numbers are added as pairs, the rest is refused."""
    group = StreamGroup(get_backend("gloo"), dist.group.WORLD, (0, 1), rank)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2, torch.complex64):
        own = torch.full((2,), rank + 1.0).to(dtype)
        gathered = torch.zeros(4).to(dtype)
        group.all_gather_into(gathered, own)
        assert gathered.to(torch.complex64).real.tolist() == [1, 1, 2, 2]
        exchanged = torch.zeros(2).to(dtype)
        group.all_to_all(exchanged, own)
        assert exchanged.to(torch.complex64).real.tolist() == [1, 2]
        sent = torch.full((3, 2), float(rank)).to(dtype).t()
        group.broadcast(sent, 1)
        assert sent.to(torch.complex64).real.unique().tolist() == [1]
        if dtype.is_complex:
            continue
        for call in (
            group.all_reduce,
            lambda t: group.reduce(t, 0),
            lambda t: group.reduce_scatter_into(t[:1], t),
        ):
            with pytest.raises(
                ConfigurationError, match=f"{dtype} is not possible on cpu: .* convert them to int32"
            ):
                call(own)
    uneven = torch.zeros(3, dtype=torch.int16)
    if rank == 0:  # gloo itself gathers even parts only
        parts = mock.Mock(wait=lambda: None)
        with mock.patch.object(group, "_start", lambda call, *args: parts.tensors(*args) and parts):
            group.all_gather_into(uneven, uneven[:1], [1, 2])
        (pieces,), _ = parts.tensors.call_args.args
        assert [(p.dtype, p.numel()) for p in pieces] == [(torch.uint8, 2), (torch.uint8, 4)]

    numbers = torch.full((2, 2), complex(1, rank))
    group.all_reduce(numbers)
    assert numbers.tolist() == [[complex(2, 1)] * 2] * 2
    group.reduce(numbers, 0)
    assert rank == 1 or numbers.tolist() == [[complex(4, 2)] * 2] * 2
    part = torch.zeros(1, dtype=torch.complex64)
    group.reduce_scatter_into(part, torch.full((2,), complex(rank, 1)))
    assert part.tolist() == [complex(1, 2)]
