"""What would hang is named, with the lines of both ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

from shardkit.tools.rehearsal import rehearse
from tests.rehearsal import hangs

PROGRAMS = [f for _, f in inspect.getmembers(hangs, inspect.isfunction) if f.__module__ == hangs.__name__]


def lines_with(program: Callable[[int], None], mark: str) -> list[int]:
    lines, first = inspect.getsourcelines(program)
    return [first + k for k, line in enumerate(lines) if re.search(rf"#.*\b{mark}\b", line)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_both_places_are_named(program: Callable[[int], None]) -> None:
    report = rehearse(program, 3, memory=False)
    assert not report.is_good
    assert report.hang is not None
    for mark in ("here", "there"):
        for line in lines_with(program, mark):
            where = report.hang.what if program.__name__ != "exception_on_one_rank" else str(report)
            assert f"hangs.py:{line}" in where, str(report)
    assert set(report.hang.stands) == {0, 1, 2}


def test_uneven_batches_are_seen_before_they_matter() -> None:
    report = rehearse(hangs.one_rank_fewer_batches, 3, steps=1)
    assert report.is_good
    (text,) = report.uneven_batches()
    assert "4 on ranks 0, 2, 3 on rank 1" in text
