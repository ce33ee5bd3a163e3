"""Deliberate faults can't rot: their text is in the source once, their tests exist, the page lists them."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.deliberate_faults.fault import CORE, XLA, Fault
from tests.deliberate_faults.planting import ROOT, failed_in, is_case_of
from tests.deliberate_faults.report import PAGE, with_table
from tests.deliberate_faults.table import FAULTS


@functools.cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_fits_the_source(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has {fault.old!r} {text.count(fault.old)} times"
    assert fault.new != fault.old
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.environment in (CORE, XLA)
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name.split("[")[0] in _functions(file), f"{file} has no {name}"


def test_faults_have_names_of_their_own() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert len({(f.file, f.old, f.new) for f in FAULTS}) == len(FAULTS)


def test_the_page_lists_them() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), (
        "python -m tests.deliberate_faults --report writes it"
    )


def test_what_pytest_says_is_understood() -> None:
    output = "FAILED tests/a.py::test_x[2-b c] - AssertionError: no\nERROR tests/a.py::test_y\n1 failed"
    assert failed_in(output) == ["tests/a.py::test_x[2-b c]", "tests/a.py::test_y"]
    assert is_case_of("tests/a.py::test_x[2-b c]", "tests/a.py::test_x")
    assert not is_case_of("tests/a.py::test_xy", "tests/a.py::test_x")
