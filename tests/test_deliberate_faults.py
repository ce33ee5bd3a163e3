"""Deliberate faults can't rot: each has exactly one place in the source, and its tests exist."""

from __future__ import annotations

import ast

import pytest

from tests.deliberate_faults.fault import Fault, NotAFaultError, all_faults, read
from tests.deliberate_faults.places import ROOT, node_id, place
from tests.deliberate_faults.planting import failed_in, is_case_of

FAULTS = all_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_has_one_place(fault: Fault) -> None:
    found = place(fault)
    planted = ast.parse(found.planted(), found.file)
    assert ast.dump(planted) != ast.dump(ast.parse((ROOT / found.file).read_text()))
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
