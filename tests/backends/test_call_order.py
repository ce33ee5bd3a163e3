"""What a channel predicts, and that only what it did not predict needs an agreement (no processes)."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from shardkit.backends.c10d.call_order import Agreement, CallOrder, Key


def key(label: str) -> Key:
    return "all_gather_into", 4, label


def turns(course: CallOrder, labels: str) -> int:
    """Issues calls; how many had not been predicted."""
    count = 0
    for label in labels:
        if not course.expects(key(label)):
            course.turn(key(label))
            count += 1
    return count


def test_what_repeats_is_predicted() -> None:
    course = CallOrder()
    assert turns(course, "abcba") == 5
    assert turns(course, "abcba") <= 2  # what comes after a step is new, and which a it is
    assert turns(course, "abcba" * 50) == 0


def test_a_unit_that_is_called_twice() -> None:
    course = CallOrder()
    turns(course, "abbcbba" * 3)
    assert turns(course, "abbcbba" * 50) == 0


def test_an_evaluation_now_and_then_is_known_the_second_time() -> None:
    course = CallOrder()
    turns(course, "abcba" * 20 + "abc" * 5 + "abcba" * 20)
    assert turns(course, "abc" * 5 + "abcba" * 20) <= 3


def test_another_order_is_a_turn() -> None:
    course = CallOrder()
    turns(course, "abcd" * 5)
    assert course.expects(key("a"))
    assert not course.expects(key("c"))


def test_long_runs_are_forgotten_alike() -> None:
    """Nothing grows, and the prediction outlives it."""
    course = CallOrder()
    turns(course, "abcba" * 3)
    assert turns(course, "abcba" * 4000) == 0
    assert len(course.history) <= 2 * 4096


LIMIT = timedelta(seconds=20)


def test_an_agreement_needs_all_and_the_same() -> None:
    store = dist.HashStore()
    first = Agreement(store, "parameters", 1, key("a"), 3, LIMIT)
    second = Agreement(store, "parameters", 1, key("b"), 3, LIMIT)
    third = Agreement(store, "parameters", 1, key("a"), 3, LIMIT)
    assert not third.is_completed()
    with pytest.raises(RuntimeError, match="timed out"):
        first.wait(timedelta(milliseconds=20))
    Agreement(store, "parameters", 1, key("a"), 3, LIMIT)
    for agreement in (first, second, third):
        agreement.wait(timedelta(milliseconds=20))


def test_agreements_leave_little_behind() -> None:
    store = dist.HashStore()
    for number in range(1, 20):
        for _ in range(2):
            last = Agreement(store, "parameters", number, key(f"call {number}"), 2, LIMIT)
        last.wait(timedelta(milliseconds=20))
    assert store.num_keys() <= 2
