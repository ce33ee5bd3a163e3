"""Simulated ranks: everything happens in the same order, failures end all ranks. Drawn programs train on them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import Group, ReduceOp, backend_for, get_backend
from shardkit.errors import ConfigurationError, OutOfStepError, RankFailedError, RankLostError
from shardkit.optim.oss import OSS


def launch(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = 30) -> list[Any]:
    return shardkit.launch(fn, world_size, backend="simulated", args=args, timeout=timeout)


def group() -> Group:
    return get_backend("simulated").group()


# ------------------------------------------------------------------ training
def test_training_draws_the_same_numbers_in_every_run() -> None:
    def train(rank: int) -> tuple[list[float], dict[str, Any] | None]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
        wrapped = shardkit.ShardedDDP(model, optimizer)
        losses = []
        for _ in range(3):
            loss = wrapped(torch.randn(4, 6)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.consolidate_state_dict()
        return losses, optimizer.state_dict() if rank == 0 else None

    first, second = launch(train, 3), launch(train, 3)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len({tuple(losses) for losses, _ in first}) == 3


# ------------------------------------------------------------------ turns and random numbers
def test_one_rank_at_a_time_in_the_same_order() -> None:
    def work(rank: int, lists: Any) -> None:
        for _ in range(3):
            order.append(rank)
            time.sleep(0.002)
            order.append(rank)
            group().barrier()

    order: list[int] = []
    launch(work, 3, [])
    expected = [0, 0, 1, 1, 2, 2, 2, 2, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2]
    assert order == expected


def test_random_states_belong_to_ranks() -> None:
    def draw(rank: int, meet: bool) -> list[Any]:
        torch.manual_seed(rank)
        random.seed(rank)
        drawn = []
        for _ in range(4):
            drawn += [torch.rand(2).tolist(), random.random()]
            if meet:
                group().barrier()
        return drawn

    before = torch.get_rng_state(), random.getstate()
    assert launch(draw, 3, True) == launch(draw, 3, False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_ranks_share_no_arguments_and_no_objects() -> None:
    def work(rank: int, shared: list[int]) -> list[Any]:
        shared.append(rank)
        received = group().all_gather_object(shared)
        received[0].append("mine")
        group().barrier()
        return [shared, received]

    arguments: list[int] = []
    for rank, (mine, received) in enumerate(launch(work, 2, arguments)):
        assert mine == [rank]
        assert received == [[0, "mine"], [1]]
    assert arguments == []


def test_undefined_contents_show() -> None:
    def work(rank: int) -> None:
        tensor = torch.ones(2)
        group().reduce(tensor, 1)
        assert tensor.isnan().all() if rank == 0 else tensor.tolist() == [2.0, 2.0]
        whole, shard = torch.ones(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        group().reduce_scatter_into(shard, whole)
        assert shard.tolist() == [2]
        assert whole.tolist() == [2**31 - 1] * 2

    launch(work, 2)


def test_launch_inside_of_a_rank() -> None:
    def inner(rank: int) -> float:
        tensor = torch.tensor([1.0])
        group().all_reduce(tensor)
        return tensor.item()

    def outer(rank: int) -> list[Any]:
        group().barrier()
        result = launch(inner, 3)
        group().barrier()
        return result

    assert launch(outer, 2) == [[3.0] * 3] * 2


def test_the_backend_of_a_rank_is_found_by_its_thread() -> None:
    def work(rank: int) -> tuple[str, int]:
        return backend_for([torch.zeros(1)]).name, group().rank

    assert launch(work, 2) == [("simulated", 0), ("simulated", 1)]
    assert backend_for([torch.zeros(1)]).name == "gloo"
    with pytest.raises(ConfigurationError, match="no simulated rank"):
        group()
    with pytest.raises(ConfigurationError, match="at least 1"):
        launch(work, 0)


# ------------------------------------------------------------------ failures
def test_a_failing_rank_ends_all_of_them_at_once() -> None:
    ends: list[Any] = []

    def work(rank: int) -> None:
        try:
            group().barrier()
            if rank == 1:
                raise KeyError("the reason")
            group().all_reduce(torch.ones(1), label="after")
        except RankLostError as error:
            ends.append((rank, str(error)))
            raise

    began = time.monotonic()
    with pytest.raises(RankFailedError, match="the reason") as caught:
        launch(work, 4)
    assert time.monotonic() - began < 60
    assert (caught.value.rank, caught.value.remote_type) == (1, "KeyError")
    assert isinstance(caught.value.__cause__, KeyError)
    assert all("rank 1 failed with KeyError" in text for _, text in ends)
    assert "(after)" in dict(ends)[3]  # it was there already, the others had not come so far or not yet


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except OutOfStepError as error:
        return str(error)
    return "went through"


def test_different_calls_are_named_on_all_ranks() -> None:
    def work(rank: int) -> list[str]:
        g, t = group(), torch.ones(4)
        a, b = g.channel("a"), g.channel("b")
        calls = [
            lambda: g.all_reduce(t, label="loss") if rank else g.broadcast(t, 0, label="weights"),
            lambda: g.all_reduce(t, op=ReduceOp.MAX if rank else ReduceOp.SUM, label="norm"),
            lambda: g.all_reduce(t[: 2 + rank], label="sizes"),
            lambda: g.all_gather_into(t, t[:2] if rank else t[:3], [3 - rank, 1 + rank], label="parts"),
            lambda: (a if rank else b).barrier(label="line"),
            lambda: g.all_to_all(t, t.clone(), [2, 2], [1 + rank, 3 - rank], label="pieces"),
            lambda: g.all_gather_object(1) if rank else g.gather_object(1, 0),
        ]
        return [outcome(call) for call in calls]

    for texts in launch(work, 2):
        for text, words in zip(
            texts,
            ["all_reduce of 4 elements (loss)|broadcast of 4 elements (weights)", "with max|with sum", "of 2 |of 3 ",
             "with [3, 1]|with [2, 2]", "'a'|'b'|(line)", "pieces|rank 0 sends 1 elements to rank 0",
             "all_gather_o|gather_o"],
            strict=True,
        ):  # fmt: skip
            assert all(word in text for word in words.split("|")), text
            assert "out of step" in text
            assert "('" not in text
            assert text.count("(loss)") <= 1, text


def test_the_group_works_on_after_a_caught_error() -> None:
    def work(rank: int) -> tuple[str, float]:
        g, t = group(), torch.ones(1)
        text = outcome(lambda: g.all_reduce(t) if rank else g.broadcast(t, 0))
        g.all_reduce(t)
        return text[:20], t.item()

    assert launch(work, 3) == [("ranks are out of step"[:20], 3.0)] * 3


def test_a_rank_that_finished_is_not_waited_for() -> None:
    def work(rank: int) -> str:
        if rank == 0:
            return "done"
        return outcome(lambda: group().all_reduce(torch.ones(1), label="one more"))

    first, *others = launch(work, 3)
    assert first == "done"
    assert all("rank 0 has finished" in text and "(one more)" in text for text in others)


def test_giving_up() -> None:
    def work(rank: int) -> str:
        if rank == 0:
            return outcome(lambda: group().barrier(label="together"))
        group().abort()
        return outcome(lambda: group().barrier())

    for text in launch(work, 2):
        assert "(together), call 1 of channel 'main' at " in text
        assert "but rank 1 gave up" in text


def _all_give_up_and_go_on(rank: int) -> float:
    total = torch.ones(1)
    for _ in range(2):  # a lower rank is in the next call before a higher one has given up
        group().abort("its forward raised")
        group().all_reduce(total)
    return float(total)


def test_ranks_that_all_gave_up_go_on_together() -> None:
    assert launch(_all_give_up_and_go_on, 3) == [9.0] * 3


def test_only_a_ranks_own_thread_communicates() -> None:
    def work(rank: int) -> str:
        g, texts = group(), []

        def other() -> None:
            try:
                g.barrier()
            except ConfigurationError as error:
                texts.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return texts[0]

    assert all("only the thread that runs a simulated rank" in text for text in launch(work, 2))


def test_timeout_shows_where_ranks_are() -> None:
    def endless(rank: int) -> None:
        if rank == 1:
            time.sleep(1.5)
        group().barrier()

    with pytest.raises(RankFailedError, match="endless") as caught:
        launch(endless, 3, timeout=0.5)
    assert (caught.value.rank, caught.value.remote_type) == (1, "TimeoutError")
