"""Folders of steps: which there are, and which are complete."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ..training_checkpoints.manifest import NAME as MANIFEST

_STEP = re.compile(r"step-(\d{8,})")


class StepFolder(NamedTuple):
    """A folder of one step.

    Attributes:
        name: of the folder.
        step: its number.
        is_complete: it has a ``shardkit.json``, which comes last.
    """

    name: str
    step: int
    is_complete: bool


def steps_in(folder: str) -> list[StepFolder]:
    """All, by step."""
    found = []
    for entry in os.scandir(folder):
        match = _STEP.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append(
                StepFolder(entry.name, int(match[1]), os.path.isfile(os.path.join(entry.path, MANIFEST)))
            )
    return sorted(found, key=lambda s: s.step)


def complete_steps(folder: str) -> list[StepFolder]:
    """Those that can be read, by step."""
    return [step for step in steps_in(folder) if step.is_complete]
