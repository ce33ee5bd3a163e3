"""The host-side meeting of replicas, with plain threads: who waits for whom, and what is out of step."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from shardkit.backends.xla.meeting import ReplicaCall, ReplicaMeeting, Turns
from shardkit.errors import OutOfStepError, RankLostError

Outcome = dict[int, object] | Exception


class Threads:
    """One thread a rank; each says with which calls it arrives, or that it leaves."""

    def __init__(self, size: int) -> None:
        self.meeting = ReplicaMeeting(size)
        self.outcomes: dict[int, queue.SimpleQueue[Outcome]] = {r: queue.SimpleQueue() for r in range(size)}

    def arrive(self, rank: int, *calls: ReplicaCall) -> None:
        def body() -> None:
            try:
                self.outcomes[rank].put(self.meeting.arrive(rank, "sync", calls, f"from {rank}"))
            except Exception as error:
                self.outcomes[rank].put(error)

        threading.Thread(target=body, daemon=True).start()

    def outcome(self, rank: int) -> Outcome:
        return self.outcomes[rank].get(timeout=10)

    def waits(self, rank: int) -> bool:
        time.sleep(0.05)
        return self.outcomes[rank].empty()


EVERYONE = ReplicaCall((0, 1, 2, 3), "all_reduce")
LOW, HIGH = ReplicaCall((0, 1), "all_reduce"), ReplicaCall((2, 3), "broadcast")


def test_all_arrive_and_get_all_payloads() -> None:
    threads = Threads(4)
    for rank in range(3):
        threads.arrive(rank, EVERYONE)
    assert all(threads.waits(rank) for rank in range(3))
    threads.arrive(3, EVERYONE)
    for rank in range(4):
        assert threads.outcome(rank) == {r: f"from {r}" for r in range(4)}


def test_disjoint_groups_do_not_wait_for_each_other() -> None:
    threads = Threads(4)
    for rank in (0, 1):
        threads.arrive(rank, LOW, LOW)
    for rank in (0, 1):
        assert threads.outcome(rank) == {r: f"from {r}" for r in (0, 1)}


def test_groups_that_share_a_rank_wait_for_each_other() -> None:
    threads = Threads(4)
    middle = ReplicaCall((1, 2), "all_reduce")
    threads.arrive(0, LOW)
    threads.arrive(1, LOW, middle)
    assert threads.waits(0)
    threads.arrive(2, middle)
    for rank in (0, 1, 2):
        assert threads.outcome(rank) == {r: f"from {r}" for r in (0, 1, 2)}


@pytest.mark.parametrize(
    "what", ["all_gather_into(float32[2])", "reduce_scatter_into(float32[4], avg)", "all_reduce"]
)
def test_labels_are_compared(what: str) -> None:
    """Of two layers of one shape each rank would get the other's values, or gradients."""
    threads = Threads(2)
    for rank, label in enumerate(("parameters of one unit", "of another")):
        threads.arrive(rank, ReplicaCall((0, 1), what, label))
    assert isinstance(threads.outcome(1), OutOfStepError)


@pytest.mark.parametrize(
    "other", [(ReplicaCall((0, 1), "barrier"),), (LOW, LOW), (ReplicaCall((0, 1), "barrier"), LOW)], ids=str
)
def test_different_calls(other: tuple[ReplicaCall, ...]) -> None:
    threads = Threads(2)
    threads.arrive(0, LOW)
    threads.arrive(1, *other)
    for rank in range(2):
        error = threads.outcome(rank)
        assert isinstance(error, OutOfStepError)
        assert "rank 0: sync with 1 collective(s): all_reduce" in str(error)


def test_the_first_difference_is_that_within_a_group() -> None:
    threads = Threads(4)
    threads.arrive(0, LOW, EVERYONE, ReplicaCall(EVERYONE.group, "barrier"))
    threads.arrive(1, LOW, EVERYONE, ReplicaCall(EVERYONE.group, "broadcast", "weights"))
    for rank in (2, 3):  # what they do among themselves is no difference
        threads.arrive(rank, HIGH, HIGH, EVERYONE)
    for rank in range(4):
        last = str(threads.outcome(rank)).splitlines()[-2]
        assert last == (
            "First difference, at collective 1 of ranks [0, 1, 2, 3]: "
            "rank 0: barrier; rank 1: broadcast 'weights'; rank 2: nothing; rank 3: nothing"
        )


def test_a_rank_that_left_is_missed_at_once_and_later() -> None:
    threads = Threads(4)
    threads.arrive(0, EVERYONE)
    threads.meeting.leave(3, "has finished its function")
    for rank in (0, 1):
        if rank:
            threads.arrive(rank, EVERYONE)
        error = threads.outcome(rank)
        assert isinstance(error, OutOfStepError)
        assert "rank 3: has finished its function" in str(error)


def test_a_rank_that_failed_is_lost() -> None:
    threads = Threads(2)
    threads.arrive(0, LOW)
    threads.meeting.leave(1, "failed with ValueError", failed=True)
    assert isinstance(threads.outcome(0), RankLostError)


def test_nobody_left_to_come() -> None:
    threads = Threads(4)
    threads.arrive(0, LOW)
    threads.arrive(2, HIGH)
    threads.arrive(1, ReplicaCall((1, 3), "all_reduce"))
    assert threads.waits(2)
    threads.arrive(3, HIGH)
    assert all(isinstance(threads.outcome(rank), dict) for rank in (2, 3))
    assert threads.waits(0)  # rank 3 may still come to rank 1
    threads.meeting.leave(3, "finished")
    assert isinstance(threads.outcome(1), OutOfStepError)
    threads.meeting.leave(1, "failed", failed=True)
    assert isinstance(threads.outcome(0), RankLostError)


def test_ranks_that_meet_among_themselves_first() -> None:
    """They get through, whoever waits for all of them already."""
    threads = Threads(4)
    for rank in (0, 1, 2):
        threads.arrive(rank, EVERYONE)
    assert threads.waits(0)
    threads.arrive(3, ReplicaCall((3,), "barrier"))
    assert isinstance(threads.outcome(3), dict)
    assert threads.waits(0)
    threads.arrive(3, EVERYONE)
    assert all(isinstance(threads.outcome(rank), dict) for rank in range(4))


def test_turns_go_round_and_random_states_stay() -> None:
    import random

    turns = Turns()
    drawn: dict[int, list[float]] = {rank: [] for rank in range(3)}
    running: list[int] = []

    def body(rank: int) -> None:
        turns.take(rank)
        random.seed(1)
        for _ in range(50):
            running.append(rank)
            assert running == [rank]
            drawn[rank].append(random.random())
            running.clear()
            with turns.given():
                pass
        turns.give()

    before = random.getstate()
    all_threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(3)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join(20)
    random.setstate(before)
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 50
