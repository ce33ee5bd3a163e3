"""A copy of the source with one fault at a time, and the tests that run on it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.deliberate_faults.fault import CORE, XLA, Fault, NotAFaultError
from tests.deliberate_faults.places import ROOT, node_id, place

COPIED = (
    "shardkit",
    "backends",
    "compat",
    "tests",
    "examples",
    "docs",
    "pyproject.toml",
    "README.md",
    "Makefile",
)
PYTHON = {CORE: ROOT / ".venv/bin/python", XLA: ROOT / ".venv-xla/bin/python"}
SECONDS = 400  # for the tests of one fault; each has a minute for itself


class Outcome(NamedTuple):
    """What the tests of one fault said.

    Attributes:
        red: tests that failed, as pytest names them.
        problem: why this shows nothing (no such text, a test that passed, nothing that ran); "" if it was noticed.
    """

    red: list[str]
    problem: str


def interpreter(environment: str) -> str | None:
    """The Python of an environment of ``make``; this one where there is none for the core; else None."""
    path = PYTHON[environment]
    if path.exists():
        return str(path)
    return sys.executable if environment == CORE else None


class Copy:
    """The source in a folder of its own, which is the only place where faults are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writes = 0
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "_build")
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(source, folder / name)

    def write(self, file: str, text: str) -> None:
        """Replaces a file. Each time is another one, or Python would take what it had compiled before."""
        path = self.folder / file
        path.write_text(text)
        self._writes += 1
        at = path.stat().st_mtime + 10 * self._writes
        os.utime(path, (at, at))

    def try_out(self, fault: Fault) -> Outcome:
        """Plants a fault, runs its tests, and takes it out again."""
        python = interpreter(fault.environment)
        if python is None:
            return Outcome([], f"needs {PYTHON[fault.environment].relative_to(ROOT)}")
        try:
            tests, planted = [node_id(test) for test in fault.tests], place(fault)
        except NotAFaultError as error:
            return Outcome([], str(error))
        text = (self.folder / planted.file).read_text()
        self.write(planted.file, planted.planted())
        try:
            code, output = self.run_tests(python, tests)
        finally:
            self.write(planted.file, text)
        red = failed_in(output)
        # what should be an error became a crash, which nobody overlooks
        if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            return Outcome([f"the process, by signal {-code}"], "")
        if code != 1:
            return Outcome(red, f"pytest ended with {code}:\n{output[-3000:]}")
        passed = [t for t in tests if not any(is_case_of(r, t) for r in red)]
        return Outcome(red, f"passed all the same: {', '.join(passed)}" if passed else "")

    def run_tests(self, python: str, tests: list[str]) -> tuple[int, str]:
        """Exit status of pytest, and what it printed."""
        pytest = [
            python,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "--timeout=120",
        ]
        process = subprocess.Popen(
            [*pytest, *tests],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return -1, f"no end after {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks that hang because of the fault
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failed_in(output: str) -> list[str]:
    """The tests that failed, from pytest's summary."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)


def is_case_of(case: str, test: str) -> bool:
    """Whether pytest means this test, or one of its cases."""
    return case == test or case.startswith((f"{test}[", f"{test}::"))
