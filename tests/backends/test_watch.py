"""Which ranks are taken to be out of step, on what they published (no processes)."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from shardkit.backends.diagnosis.calls import Call
from shardkit.backends.diagnosis.watchdog import Watch, begin_job
from shardkit.errors import OutOfStepError

SUM = ("all_reduce", 4, "loss")
GATHER = ("all_gather_into", 4, "parameters")


class Rank:
    """A rank that issues calls and looks around."""

    def __init__(self, store: Any, rank: int, world_size: int = 2) -> None:
        self.watch = Watch(store, rank, world_size, "test")

    def issue(self, channel: str, operation: str, numel: int, label: str) -> Call:
        number = self.watch.issued.get(channel, 0) + 1
        self.watch.issued[channel] = number
        call = Call(channel, number, operation, numel, label)
        self.watch.recent.append(tuple(call))
        return call


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    store = dist.HashStore()
    return Rank(store, 0), Rank(store, 1)


def look_around(ranks: tuple[Rank, ...], calls: tuple[Call, ...], rounds: int) -> str:
    for _ in range(rounds):
        for rank, call in zip(ranks, calls, strict=True):
            try:
                rank.watch.look(call)
            except OutOfStepError as error:
                return str(error)
    return ""


def test_other_operation_in_the_same_place_shows_at_once(pair: tuple[Rank, Rank]) -> None:
    calls = pair[0].issue("main", *SUM), pair[1].issue("main", *GATHER)
    text = look_around(pair, calls, 1)
    assert (
        "rank 1 is in all_gather_into of 4 elements (parameters), call 1 of channel 'main'"
        in reversed_names(text)
    )


def reversed_names(text: str) -> str:
    """Either of the two may notice first."""
    return text.replace("rank 0 is in all_gather", "rank 1 is in all_gather")


def test_what_the_other_issued_before_counts_too(pair: tuple[Rank, Rank]) -> None:
    """A rank that sends may be through with its call and wait in the next."""
    mine = pair[0].issue("main", *SUM)
    pair[1].issue("main", "broadcast(src=1)", 4, "weights")
    text = look_around(pair, (mine, pair[1].issue("main", *SUM)), 2)
    assert "broadcast(src=1) of 4 elements (weights), call 1" in text
    assert "all_reduce of 4 elements (loss), call 1" in text


def test_other_sizes(pair: tuple[Rank, Rank]) -> None:
    calls = pair[0].issue("main", "all_reduce", 4, ""), pair[1].issue("main", "all_reduce", 5, "")
    assert "of 5 elements" in look_around(pair, calls, 1)


def test_sizes_and_labels_that_may_differ(pair: tuple[Rank, Rank]) -> None:
    calls = pair[0].issue("main", "all_to_all", 4, "a"), pair[1].issue("main", "all_to_all", 5, "b")
    assert look_around(pair, calls, 5) == ""


def test_waiting_for_each_other_in_different_channels(pair: tuple[Rank, Rank]) -> None:
    calls = pair[0].issue("gradients", *SUM), pair[1].issue("main", *GATHER)
    assert look_around(pair, calls, 1) == ""  # what was read may be old
    text = look_around(pair, calls, 2)
    assert "channel 'gradients'" in text
    assert "channel 'main'" in text
    theirs = look_around(pair, calls, 1)
    assert theirs in {
        f"rank {rank} gave up: {text}" for rank in range(2)
    }  # which says where this one is, too


def test_a_rank_that_gets_on_is_waited_for(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    for _ in range(6):
        theirs = pair[1].issue("other", *SUM)
        pair[1].watch.look(theirs)  # in a new call each time
        pair[0].watch.look(mine)
        pair[1].watch.arrived()


def test_calls_that_are_only_late(pair: tuple[Rank, Rank]) -> None:
    """Rank 0 has issued both and waits in one, rank 1 waits in the other: nothing is wrong."""
    first = pair[0].issue("a", *SUM)
    pair[0].issue("b", *SUM)
    assert look_around(pair, (first, pair[1].issue("b", *SUM)), 5) == ""


def test_a_slow_rank_is_waited_for(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    for _ in range(5):
        pair[0].watch.look(mine)
    pair[1].watch.look(pair[1].issue("main", *SUM))
    pair[1].watch.arrived()
    for _ in range(5):
        pair[0].watch.look(pair[0].issue("main", *SUM))


def test_old_calls_are_forgotten_not_mistaken(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    for _ in range(1000):
        theirs = pair[1].issue("main", *GATHER)
    assert look_around(pair, (mine, theirs), 5) == ""


def test_a_rank_whose_function_has_returned(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    pair[1].watch.leave()
    with pytest.raises(OutOfStepError, match="rank 1 has returned from its function"):
        pair[0].watch.look(mine)


def test_what_was_sent_before_returning_is_waited_for(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    pair[1].issue("main", *SUM)
    pair[1].watch.leave()
    pair[0].watch.look(mine)


def test_something_else_was_sent_before_returning(pair: tuple[Rank, Rank]) -> None:
    mine = pair[0].issue("main", *SUM)
    pair[1].issue("main", *GATHER)
    pair[1].watch.leave()
    with pytest.raises(OutOfStepError, match="rank 1 is in all_gather_into"):
        pair[0].watch.look(mine)


def test_an_earlier_function_does_not_count(pair: tuple[Rank, Rank]) -> None:
    pair[1].watch.leave()
    begin_job()
    pair[0].watch.look(pair[0].issue("main", *SUM))
