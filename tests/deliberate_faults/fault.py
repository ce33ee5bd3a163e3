"""Deliberate faults, as `faults.txt` lists them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

CORE, XLA = "core", "xla"  # environments: .venv, .venv-xla


class NotAFaultError(Exception):
    """A fault that does not fit the source or the tests, or an entry that can't be read."""


@dataclass(frozen=True)
class Fault:
    """One wrong place in the source, and the tests that notice it.

    Attributes:
        part: of shardkit; where it names XLA, the tests run on the oldest torch with XLA.
        breaks: in words; unique in its part.
        symbol: name of the function, class or assigned name it is in, wherever that is: `step` or `OSS.step`.
        old: an expression, or statements; exactly once within the symbol, whatever its layout and comments. `f(...)`
            is any call of `f`.
        new: what stands there instead; "" for nothing.
        tests: names of functions in `tests/`, with a case's "[...]" if need be; `file::name` where several files
            have the name. All have to fail, each in at least one of its cases.
    """

    part: str
    breaks: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.part}: {self.breaks}"

    @property
    def environment(self) -> str:
        return XLA if "XLA" in self.part else CORE


_ENTRY = re.compile(
    r"\* (?P<breaks>.+)\n  in (?P<symbol>\S+), seen by (?P<tests>.+)\n(?P<change>(?:  [-+] .*\n)+)"
)


def read(text: str) -> list[Fault]:
    """The faults of a file like `faults.txt`."""
    found: list[Fault] = []
    for section in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        part, _, entries = section.partition("\n")
        if rest := _ENTRY.sub("", entries).strip():
            raise NotAFaultError(f"can't be read, in {part!r}: {rest[:200]}")
        for entry in _ENTRY.finditer(entries):
            lines = entry["change"].splitlines()
            old, new = ("\n".join(line[4:] for line in lines if line[2] == sign) for sign in "-+")
            tests = tuple(re.split(r", (?=[\w/:]*test_)", entry["tests"]))
            found.append(Fault(part, entry["breaks"], entry["symbol"], old, new, tests))
    return found


@functools.cache
def all_faults() -> list[Fault]:
    return read(Path(__file__).with_name("faults.txt").read_text())
