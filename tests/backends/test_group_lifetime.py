"""What a process group costs a process, and that it is given back when torch destroys the group."""

from __future__ import annotations

import datetime
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.backend import get_backend
from shardkit.backends.processes import RankPool
from shardkit.errors import ConfigurationError, LifecycleError
from tests.pools import ForkedPool, free_port, rank_pool
from tests.started import output_of, program

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


def _create_and_destroy(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
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
    return before, _held()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_destroyed_groups_leave_nothing() -> None:
    for before, after in rank_pool(2).run(_create_and_destroy):
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
    for time in range(2):
        own = dist.PrefixStore(f"time {time}", store)
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


def _still_held(rank: int) -> list[str]:
    process_group = dist.new_group([0, 1])
    group = get_backend("gloo").group(process_group)
    channel = group.channel("control")
    channel.barrier()
    dist.destroy_process_group(process_group)
    return _refused(channel.barrier, group.barrier, lambda: get_backend("gloo").group(process_group))


def test_a_destroyed_group_that_somebody_holds() -> None:
    for said in rank_pool(2).run(_still_held):
        assert ["destroyed" in text for text in said] == [True] * 3, said


def _timeouts(rank: int) -> list[float]:
    """As the channels' gloo has them."""
    process_group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=77))
    group = get_backend("gloo").group(process_group)
    part = group.new_group([0, 1])
    assert part is not None
    return [g._timeout.total_seconds() for g in (group, group.channel("control"), part)]  # type: ignore[attr-defined]


def test_channels_have_the_timeout_of_the_process_group() -> None:
    assert rank_pool(2).run(_timeouts) == [[77.0] * 3] * 2


MOST_SOCKETS = {2: 10, 4: 19, 8: 32}  # by world size; docs/MEASUREMENTS.md says so
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
