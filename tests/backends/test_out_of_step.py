"""Ranks that part ways or die, on real processes: every rank that is left hears of it within seconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.backend import Group, get_backend
from shardkit.backends.processes import RankPool
from shardkit.errors import OutOfStepError, ShardkitError
from shardkit.optim.oss import OSS

SOON = 15.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout=400, environment={"OMP_NUM_THREADS": "1"}) as pool:
        yield pool


def _fresh() -> Group:
    """Connections of their own: after an error they are not used any more."""
    group = get_backend("gloo").group().new_group([0, 1])
    assert group is not None
    return group


def _caught(run: Callable[[], Any]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        run()
    except ShardkitError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _check(outcomes: list[tuple[str, str, float]], *words: str) -> None:
    for kind, text, seconds in outcomes:
        assert kind == OutOfStepError.__name__, text
        assert seconds < SOON
        for word in ("rank 0", "rank 1", *words):
            assert word in text, text


# ------------------------------------------------------------------ different calls
def _other_operation(rank: int) -> tuple[str, str, float]:
    group, tensor = _fresh(), torch.ones(4)
    if rank == 0:
        return _caught(lambda: group.all_reduce(tensor, label="loss"))
    return _caught(lambda: group.all_gather_into(torch.ones(4), torch.ones(2), label="parameters"))


def test_different_operations(two: RankPool) -> None:
    _check(
        two.run(_other_operation), "all_reduce", "(loss)", "all_gather_into", "(parameters)", "channel 'main'"
    )


def _other_channel(rank: int) -> tuple[str, str, float]:
    group = _fresh()
    one, two = group.channel("one"), group.channel("two")
    return _caught(lambda: (two if rank else one).all_reduce(torch.ones(4), label=f"call of rank {rank}"))


def test_different_channels(two: RankPool) -> None:
    _check(two.run(_other_channel), "channel 'one'", "channel 'two'", "call of rank 0", "call of rank 1")


def _channel_of_one(rank: int) -> tuple[str, str, float]:
    group = _fresh()
    return _caught(lambda: group.channel("new") if rank else group.all_reduce(torch.ones(4), label="loss"))


def test_a_channel_that_one_rank_makes(two: RankPool) -> None:
    _check(two.run(_channel_of_one), "connecting channel 'new'", "(loss)")


# ------------------------------------------------------------------ training
def _uneven_batches(rank: int, then: str) -> tuple[str, str, float]:
    group = _fresh()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.1, group=group)
    wrapped = shardkit.ShardedDDP(model, optimizer, group=group)

    def step() -> None:
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step()

    def uneven() -> None:
        if rank == 0:
            wrapped(torch.ones(2, 4)).sum().backward()  # one batch more
        if then == "step":
            optimizer.step()
        else:
            optimizer.consolidate_state_dict()

    return _caught(uneven)


@pytest.mark.parametrize("then", ["step", "consolidate"])
def test_uneven_numbers_of_batches(two: RankPool, then: str) -> None:
    _check(two.run(_uneven_batches, then), "gradients of bucket 0", "uneven numbers of batches")


# ------------------------------------------------------------------ slow, not lost
def _slow(rank: int) -> float:
    group, tensor = _fresh(), torch.ones(4)
    if rank == 1:
        time.sleep(6)
    group.all_reduce(tensor)
    group.all_reduce(tensor)
    return tensor[0].item()


def test_a_slow_rank_is_waited_for(two: RankPool) -> None:
    assert two.run(_slow) == [4.0, 4.0]


def _sends_and_returns(rank: int) -> float:
    group, tensor = _fresh(), torch.full((4,), float(rank))
    if rank == 1:
        time.sleep(3)
    group.broadcast(tensor, 0)
    return tensor[0].item()


def _starts_late(rank: int) -> float:
    if rank == 0:
        time.sleep(5)
    tensor = torch.ones(4)
    get_backend("gloo").group().all_reduce(tensor)
    return tensor[0].item()


def test_a_rank_that_has_returned_from_what_others_still_finish(two: RankPool) -> None:
    assert two.run(_sends_and_returns) == [0.0, 0.0]
    assert two.run(_starts_late) == [2.0, 2.0]  # that it returned before says nothing about this time


# ------------------------------------------------------------------ gone
def _returns_early(rank: int) -> None:
    if rank == 1:
        get_backend("gloo").group().all_reduce(torch.ones(4), label="loss")


def test_a_rank_that_returns_early() -> None:
    began = time.monotonic()
    with pytest.raises(shardkit.RankFailedError, match="rank 0 has returned from its function") as caught:
        shardkit.launch(_returns_early, 2)
    assert time.monotonic() - began < 2 * SOON
    assert caught.value.rank == 1
    assert caught.value.remote_type == OutOfStepError.__name__
    assert "(loss)" in str(caught.value)


# ------------------------------------------------------------------ lost
def _dies_in_backward(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
    wrapped = shardkit.ShardedDDP(model, optimizer)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 1:
        model[0].weight.register_hook(lambda _: os._exit(7))
    kind, text, seconds = _caught(lambda: wrapped(torch.ones(2, 4)).sum().backward())
    Path(folder, f"rank{rank}").write_text(f"{kind}|{seconds}|{text}")
    os._exit(0)  # the group is broken: no orderly end


def test_a_rank_that_dies_in_backward(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_dies_in_backward, args=(r, 3, str(tmp_path))) for r in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    assert [p.exitcode for p in processes] == [0, 7, 0]
    for rank in (0, 2):
        kind, seconds, text = (tmp_path / f"rank{rank}").read_text().split("|", 2)
        assert kind == "RankLostError", text
        assert float(seconds) < SOON
        assert "gradients of bucket" in text, text
