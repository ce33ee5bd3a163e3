"""What a deliberate fault is."""

from __future__ import annotations

from dataclasses import dataclass

CORE, XLA = "core", "xla"  # environments: .venv, .venv-xla


@dataclass(frozen=True)
class Fault:
    """One wrong place in the source, and the tests that notice it.

    Attributes:
        part: of shardkit.
        breaks: in words; unique in its part.
        file: path from the repository's root.
        old: text that is in the file exactly once.
        new: what stands there instead.
        tests: node ids; all of them have to fail, each in at least one of its cases.
        environment: where they run.
    """

    part: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    environment: str = CORE

    @property
    def name(self) -> str:
        return f"{self.part}: {self.breaks}"
