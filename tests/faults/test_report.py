"""docs/RELIABILITY.md shows every case of the table, and none that is no more."""

from __future__ import annotations

from tests.faults.report import REPORT, expected_rows, rows_of


def test_the_page_shows_every_case() -> None:
    assert rows_of(REPORT.read_text()) == expected_rows(), "run: python -m tests.faults.report [case ...]"
