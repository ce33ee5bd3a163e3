"""Where a thread stands, who is taken to be stuck, and that there is one watchdog a process (no processes)."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardkit.backends.c10d.group import Agreement, CallOrder, Key
from shardkit.backends.diagnosis import watchdog
from shardkit.backends.diagnosis.stack_report import Call, StackReport, ThreadPosition, is_behind, position_of
from shardkit.backends.diagnosis.watchdog import NoAnswer, Stillness, StoreThread, Watch, begin_job
from shardkit.errors import ConfigurationError, OutOfStepError


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[threading.Event], None]], ThreadPosition]]:
    """Where a function stands that runs in a thread until it is told to end."""
    end, threads = threading.Event(), []

    def begin(function: Callable[[threading.Event], None]) -> ThreadPosition:
        thread = threading.Thread(target=function, args=(end,))
        threads.append(thread)
        thread.start()
        time.sleep(0.2)
        standing = position_of(thread.ident or 0)
        assert standing is not None
        return standing

    yield begin
    end.set()
    for thread in threads:
        thread.join()


def _loads_data(end: threading.Event) -> None:
    end.wait()


def _handles(end: threading.Event) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        end.wait()


def test_a_thread_that_computes(in_thread: Any) -> None:
    standing = in_thread(_loads_data)
    assert "test_watchdog.py" in standing.where
    assert "_loads_data" in standing.where
    assert standing.operation == ""
    assert standing.error == ""
    assert not standing.has_ended


def test_a_thread_that_handles_an_error(in_thread: Any) -> None:
    assert in_thread(_handles).error == "ValueError: boom"


def test_a_thread_that_has_ended() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert position_of(thread.ident or 0) is None


def _standing(mark: int) -> ThreadPosition:
    return ThreadPosition((mark,), "train.py:1 in main", "", "", -1, "", False, False, False)


def test_stillness_begins_anew_with_each_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    stillness = Stillness()
    seconds = []
    for mark in (1, 1, 1, 2, 2):
        seconds.append(stillness.seconds(_standing(mark).mark))
        now[0] += 1
    assert seconds == [0, 1, 2, 0, 1]


def test_who_has_not_come() -> None:
    mine = {"0": 3, "1": 7}
    assert is_behind(mine, {"0": 4}, "0")
    assert is_behind(mine, {"0": 4}, "")
    assert not is_behind(mine, {"0": 3}, "0")
    assert not is_behind(mine, {"0": 2}, "0")
    assert not is_behind(mine, {"2": 5}, "2")  # a group of others


POSITION = ThreadPosition((), "train.py:7 in main", "", "", -1, "", False, False, False)
PLAIN = StackReport(9, {"main": 1}, {}, 1, 60.0, "", "", "", POSITION)


def _with(**facts: Any) -> StackReport:
    """A report, some facts of which are of the position."""
    at = {name: facts.pop(name) for name in POSITION._fields if name in facts}
    return PLAIN._replace(at=POSITION._replace(**at), **facts)


def test_what_is_certain_and_what_is_only_slow() -> None:
    slow: list[dict[str, Any]] = [
        {},
        {"error": "OSError: no data yet"},  # between two steps
        {"unfinished": "a step whose backward has not begun"},  # computes its loss
        {"error": "ValueError: boom", "unfinished": "a step whose backward has not begun", "still": 2.0},
        {"error": "ValueError: boom", "unfinished": "a backward that raised", "in_debugger": True},
        {"raised": "LifecycleError: no", "still": 2.0},
        {"operation": "recv", "peer": 5},  # waits for another rank
        {"operation": "barrier", "group": "7", "of_torch": {"7": 3}},  # not a group of this rank's
    ]
    for facts in slow:
        assert _with(**facts).why_it_will_not_come(0) == "", facts
    lost: list[tuple[dict[str, Any], str]] = [
        ({"left": "its forward raised"}, "gave up: its forward raised"),
        ({"raised": "LifecycleError: no"}, "raised LifecycleError: no, and stands at train.py:7"),
        ({"has_ended": True}, "end of its program"),
        ({"operation": "recv", "peer": 0}, "torch.distributed's recv, called at train.py:7"),
        (
            {"error": "ValueError: boom", "unfinished": "a step whose backward has not begun"},
            "handles ValueError",
        ),
        ({"unfinished": "a backward that raised an error"}, "left a backward that raised"),
    ]
    for facts, words in lost:
        assert words in _with(**facts).why_it_will_not_come(0)


# ------------------------------------------------------------------ what a watch makes of it
CALL = Call("main", 2, "all_reduce", 4, "loss")


def _publish(other: Watch, report: StackReport) -> None:
    other._board.publish("stands1", report._asdict())


def test_old_reports_say_nothing() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    mine.issued["main"] = 2
    gone = _with(left="its forward raised")
    _publish(other, gone._replace(answers=0))
    mine.look(CALL)
    _publish(other, gone._replace(answers=1))
    with pytest.raises(OutOfStepError, match="rank 1 gave up: its forward raised"):
        mine.look(CALL)


def test_a_rank_that_has_issued_the_call_is_waited_for() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    for _ in range(3):
        mine.look(CALL)
        _publish(other, _with(left="its forward raised", issued={"main": 2}, answers=99))


def test_what_a_rank_gave_up_is_over_when_it_issues_again() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    mine.look(CALL)
    other.give_up("its forward raised")
    other.attend()
    entry = mine._board.read("stands1")
    assert entry is not None
    assert entry["left"] == "its forward raised"
    other.issued["main"] = 1
    other.attend()
    entry = mine._board.read("stands1")
    assert entry is not None
    assert entry["left"] == ""


def test_who_has_raised_the_same_in_the_same_place_waits_for_the_other() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    mine.issued["main"], other.issued["main"] = 1, 1
    mine.note_error(ValueError("no"))
    mine.issued["main"] = 2
    mine.look(CALL)
    for raised in ({"left": "its forward raised"}, {"raised": "ValueError: no"}):
        _publish(other, _with(answers=99, **raised))
        mine.look(CALL)


def test_errors_are_noted_until_the_next_call() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    mine.look(CALL)
    other.issued["main"] = 0
    with pytest.raises(ConfigurationError):
        raise ConfigurationError("of shardkit's own")
    for issued, words in ((0, "ConfigurationError: of shardkit's own"), (1, "")):
        other.issued["main"] = issued
        other.attend()
        entry = mine._board.read("stands1")
        assert entry is not None
        assert entry["raised"] == words


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "shardkit-watchdog"]


def test_one_thread_that_ends_with_the_last_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_PERIOD", 0.05)
    watchdog._watchdog.end()
    gc.collect()
    store = dist.HashStore()
    kept: list[Watch] = [Watch(store, 0, 2, f"group {k}") for k in range(5)]
    assert len(_threads()) == 1
    kept[0].look(Call("main", 1, "barrier", 0, ""))
    time.sleep(0.5)
    assert kept[0]._board.read("stands0") is not None
    others = [w for w in watchdog._watchdog.watches if w not in kept and w.is_open]
    kept.clear()
    until = time.monotonic() + 20
    while not others and _threads() and time.monotonic() < until:
        time.sleep(0.05)
    assert others or not _threads()
    watchdog._watchdog.end()
    assert not _threads()


def test_one_rank_needs_no_thread() -> None:
    watchdog._watchdog.end()
    assert Watch(dist.HashStore(), 0, 1, "alone").issued == {}
    assert not _threads()


# ------------ Which ranks are taken to be out of step, on what they published (no processes).
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
    # which says where this one is, too
    assert theirs in {f"rank {rank} gave up: {text}" for rank in range(2)}


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


def test_a_rank_that_returned_as_it_heard_of_an_error() -> None:
    """A rank that looks later hears of the error, not of what others have done since."""
    store = dist.HashStore()
    first, second, third = (Rank(store, rank, 3) for rank in range(3))
    calls = first.issue("main", *SUM), second.issue("main", *GATHER), third.issue("main", *GATHER)
    text = look_around((first, second), calls[:2], 1)
    with pytest.raises(OutOfStepError, match="gave up"):
        first.watch.look(calls[0])
    first.watch.issued["main"] = 0  # as if it had issued nothing that contradicts
    first.watch.recent.clear()
    first.watch.leave()
    with pytest.raises(OutOfStepError) as caught:
        third.watch.look(calls[2])
    assert text in str(caught.value)


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


# ------------------------------------------------------------ Calls of a store that does not answer (no processes).
def test_a_store_that_does_not_answer_holds_nobody() -> None:
    aside, answers = StoreThread(), threading.Event()
    assert aside.ask(lambda: 1, 20) == 1
    began = time.monotonic()
    with pytest.raises(NoAnswer):
        aside.ask(answers.wait, 0.05)
    with pytest.raises(NoAnswer):  # at once, for it would have to wait for the first
        aside.ask(lambda: 2, 60)
    with pytest.raises(NoAnswer):
        aside.ask(lambda: 3, 0.05, patient=True)
    assert time.monotonic() - began < 20
    answers.set()
    assert aside.ask(lambda: 4, 20, patient=True) == 4
    assert aside.ask(lambda: 5, 20) == 5
    with pytest.raises(KeyError):
        aside.ask(lambda: {}["a"], 20)
    aside.end()


# ------------ What a channel predicts, and that only what it did not predict needs an agreement (no processes).
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


def test_an_agreement_of_ranks_that_are_threads() -> None:
    """The one that waits does not keep the other one from coming."""
    store, limit = dist.HashStore(), timedelta(seconds=3)
    first = Agreement(store, "parameters", 1, key("a"), 2, limit)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.wait, limit)
        time.sleep(0.1)
        Agreement(store, "parameters", 1, key("a"), 2, timedelta(seconds=1))
        waiting.result()


def test_agreements_leave_little_behind() -> None:
    store = dist.HashStore()
    for number in range(1, 20):
        for _ in range(2):
            last = Agreement(store, "parameters", number, key(f"call {number}"), 2, LIMIT)
        last.wait(timedelta(milliseconds=20))
    assert store.num_keys() <= 2
