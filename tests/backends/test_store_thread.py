"""Calls of a store that does not answer (no processes)."""

from __future__ import annotations

import threading
import time

import pytest

from shardkit.backends.diagnosis.job_store import NoAnswer, StoreThread


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
