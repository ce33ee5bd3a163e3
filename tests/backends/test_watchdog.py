"""Where a thread stands, who is taken to be stuck, and that there is one watchdog a process (no processes)."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shardkit.backends.diagnosis import watchdog
from shardkit.backends.diagnosis.calls import Call
from shardkit.backends.diagnosis.stack_report import StackReport, ThreadPosition, is_behind, position_of
from shardkit.backends.diagnosis.watchdog import Stillness, Watch
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
        seconds.append(stillness.seconds(_standing(mark)))
        now[0] += 1
    assert seconds == [0, 1, 2, 0, 1]


def test_who_has_not_come() -> None:
    mine = {"0": 3, "1": 7}
    assert is_behind(mine, {"0": 4}, "0")
    assert is_behind(mine, {"0": 4}, "")
    assert not is_behind(mine, {"0": 3}, "0")
    assert not is_behind(mine, {"0": 2}, "0")
    assert not is_behind(mine, {"2": 5}, "2")  # a group of others


PLAIN = StackReport(
    9, {"main": 1}, {}, 1, 60.0, "", "", "", "train.py:7 in main", "", "", -1, "", False, False
)


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
        assert PLAIN._replace(**facts).why_it_will_not_come(0) == "", facts
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
        assert words in PLAIN._replace(**facts).why_it_will_not_come(0)


# ------------------------------------------------------------------ what a watch makes of it
CALL = Call("main", 2, "all_reduce", 4, "loss")


def _publish(other: Watch, report: StackReport) -> None:
    other._board.publish("stands1", report._asdict())


def test_old_reports_say_nothing() -> None:
    store = dist.HashStore()
    mine, other = Watch(store, 0, 2, "test"), Watch(store, 1, 2, "test")
    mine.issued["main"] = 2
    gone = PLAIN._replace(left="its forward raised")
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
        _publish(other, PLAIN._replace(left="its forward raised", issued={"main": 2}, answers=99))


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
        _publish(other, PLAIN._replace(answers=99, **raised))
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
