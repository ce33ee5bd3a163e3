"""A plugin of pytest: once a case of a test has failed, its other cases are skipped; each would start new ranks."""

from __future__ import annotations

import pytest

_red: set[str] = set()


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _red.add(_test(report.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _test(item.nodeid) in _red:
        pytest.skip("another case of it has failed")
