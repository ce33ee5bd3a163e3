"""The folder of a run: what each attempt's ranks print, how they end, how far they are.

``runs/ID/`` holds

- ``command``: the line that was typed; ``checkpoints``: directories in which a rank has saved, one a line;
- ``attempt-N/``: ``rankR.out`` and ``rankR.err`` (what it printed), ``rankR.error.json`` (the error that ended it),
  ``rankR.steps`` (how far it is), ``rankR.stacks`` and ``rankR.where`` (where it stood when another one failed);
- ``failure.txt``: the page about the last failure; ``agent.log``: what torch's elastic agent says.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import time
from pathlib import Path

RUN_DIR = "SHARDKIT_RUN_DIR"  # environment variable: the run's folder
_STEPS = struct.Struct("qd")  # optimizer steps, and when the last one ended (0: none yet)


class RunFolder:
    """Paths of a run.

    Args:
        path: the folder; made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def attempt(self, number: int) -> Path:
        folder = self.path / f"attempt-{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def next_attempt(self) -> int:
        """Returns the number of the next one."""
        taken = [
            int(m[1]) for p in self.path.glob("attempt-*") if (m := re.fullmatch(r"attempt-(\d+)", p.name))
        ]
        return max(taken, default=-1) + 1

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    def checkpoint_dirs(self) -> list[Path]:
        """Returns the directories in which ranks have saved, the latest last."""
        try:
            lines = (self.path / "checkpoints").read_text().splitlines()
        except OSError:
            return []
        return [Path(line) for line in dict.fromkeys(filter(None, lines))]


def write_at_once(path: Path, text: str) -> None:
    """Writes a file that whoever looks finds complete, or as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def note_checkpoints(directory: str | os.PathLike[str]) -> None:
    """Tells the run that this process belongs to, if any, where checkpoints are."""
    run = os.environ.get(RUN_DIR)
    if not run:
        return
    line, file = os.path.abspath(directory), Path(run, "checkpoints")
    with contextlib.suppress(OSError):
        if not file.exists() or line not in file.read_text().splitlines():
            with file.open("a") as out:
                out.write(line + "\n")


class Steps:
    """Counts optimizer steps of a rank in a file in shared memory, which outlives the rank."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_STEPS.pack(0, 0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STEPS.size)
        self._count = 0

    def add(self) -> None:
        self._count += 1
        _STEPS.pack_into(self._map, 0, self._count, time.time())


def steps_of(path: Path) -> tuple[int, float]:
    """Reads a rank's steps, and when the last one ended; (0, 0.0) where the rank has not begun."""
    try:
        count, when = _STEPS.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return 0, 0.0
    return int(count), float(when)
