"""Deliberate faults can't rot: each has exactly one place in the source, and its tests exist."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator

import pytest

from tests.deliberate_faults.fault import Fault, NotAFaultError, all_faults, read
from tests.deliberate_faults.places import ROOT, node_id, place
from tests.deliberate_faults.planting import failed_in, is_case_of

FAULTS = all_faults()


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """Looking for cycles in syntax trees, which have none, takes ten times as long as making them."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def _dumped(file: str) -> str:
    return ast.dump(ast.parse((ROOT / file).read_text()))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_has_one_place(fault: Fault) -> None:
    found = place(fault)
    assert ast.dump(ast.parse(found.planted(), found.file)) != _dumped(found.file)
    for test in fault.tests:
        node_id(test)


def test_faults_have_names_of_their_own() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) > 200
    assert len({place(f) for f in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize(
    ("symbol", "old", "new", "message"),
    [
        ("Fsdp.step", "a", "b", "no Fsdp.step"),
        ("GradScaler.step", "self._neverthere", "b", "0 times"),
        ("GradScaler", "self._enabled", "True", "times"),
        ("GradScaler.step", "self._enabled or", "True", "no Python"),
    ],
)
def test_what_has_no_place_is_no_fault(symbol: str, old: str, new: str, message: str) -> None:
    with pytest.raises(NotAFaultError, match=message):
        place(Fault("a", "b", symbol, old, new, ()))


def test_entries_that_cannot_be_read_are_named() -> None:
    with pytest.raises(NotAFaultError, match="forgotten"):
        read("# part\n* something breaks\n  in f, seen by test_f\n  - a\n* forgotten\n  in g\n  - b\n")


def test_what_pytest_says_is_understood() -> None:
    output = "FAILED tests/a.py::test_x[2-b c] - AssertionError: no\nERROR tests/a.py::test_y\n1 failed"
    assert failed_in(output) == ["tests/a.py::test_x[2-b c]", "tests/a.py::test_y"]
    assert is_case_of("tests/a.py::test_x[2-b c]", "tests/a.py::test_x")
    assert not is_case_of("tests/a.py::test_xy", "tests/a.py::test_x")
