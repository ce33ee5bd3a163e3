"""Records of one rank, the form in which it travels (a part), and how far the clocks of ranks are apart.

[Note: clocks of ranks] A message can't arrive before it was sent. Every rank says its time to all others, several
times; what it reads on its own clock when the others' times are there is an upper bound of the difference, in both
directions. The quickest message each way gives the narrowest bounds, and the middle between them errs by at most half
their distance.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from ..backend import Group
from ..errors import DamagedFileError
from .ranges import What, now

ROUNDS = 8


class ClockReading(NamedTuple):
    """One comparison of clocks.

    Attributes:
        at: when, on this rank's clock, in ns.
        ahead: of rank 0's clock, in ns.
        error: at most, in ns.
    """

    at: int
    ahead: float
    error: float


def compare_clocks(group: Group, rounds: int = ROUNDS) -> ClockReading:
    """Compares the clocks of this rank and rank 0 (collective)."""
    if group.world_size == 1:
        return ClockReading(now(), 0.0, 0.0)
    control = group.channel("control")
    bounds = [2**62] * group.world_size  # this rank's clock minus the other's is at most that
    for _ in range(rounds):
        sent = now()
        answers = control.all_gather_bytes(struct.pack("<q", sent), label="clocks of ranks")
        arrived = now()
        for rank, answer in enumerate(answers):
            bounds[rank] = min(bounds[rank], arrived - struct.unpack("<q", answer)[0])
    form = f"<{group.world_size}q"
    rows = control.all_gather_bytes(struct.pack(form, *bounds), label="differences of clocks")
    table = [struct.unpack(form, row) for row in rows]
    most, least = table[group.rank][0], -table[0][group.rank]
    if group.rank == 0:
        return ClockReading(now(), 0.0, 0.0)
    return ClockReading(now(), (most + least) / 2, (most - least) / 2)


def on_rank_0(time: int, readings: list[ClockReading]) -> float:
    """Converts ``time`` of this rank's clock to rank 0's: clocks that drift, drift evenly between two readings."""
    if not readings:
        return float(time)
    first, last = readings[0], readings[-1]
    if last.at <= first.at or abs(last.ahead - first.ahead) <= first.error + last.error:
        best = min(readings, key=lambda reading: reading.error)
        return time - best.ahead  # no drift that could be told from the error
    part = min(1.0, max(0.0, (time - first.at) / (last.at - first.at)))
    return time - (first.ahead + part * (last.ahead - first.ahead))


FORMAT = 1


class TracePart(TypedDict):
    """One rank's records, as JSON has them.

    ``whats``: [kind, unit, ranks, nbytes]; ``events``: [number of what, start, end, thread, device start, device end],
    times in ns on the rank's clock, those of the device on the same clock or None; ``steps``: [number, when it ended];
    ``clock``: readings of it.
    """

    format: int
    rank: int
    world_size: int
    backend: str
    host: str
    process: int
    torch: str
    first_step: int
    began: int
    ended: int
    threads: list[int]
    whats: list[tuple[str, str, tuple[int, ...], int]]
    events: list[tuple[int, int, int, int, float | None, float | None]]
    steps: list[tuple[int, int]]
    clock: list[tuple[int, float, float]]


class _Event(NamedTuple):
    what: What
    start: int
    end: int
    thread: int
    marks: tuple[object, object] | None


class Recorder:
    """Listens to one rank, and keeps all it hears.

    Attributes:
        events: in the order of their ends.
        steps: number of each step that ended, and when.
    """

    def __init__(self, group: Group, first_step: int = 0) -> None:
        self._group = group
        self._first_step = first_step
        self.events: list[_Event] = []
        self.steps: list[tuple[int, int]] = []
        self.clock: list[ClockReading] = []
        self.thread = threading.get_ident()
        self.began = now()
        self.ended = 0
        self._timer = group.backend.timer()
        self.mark: Callable[[], object] | None = None
        if self._timer is not None:
            self.mark = self._timer.mark
            group.backend.synchronize()
            self._zero = self._timer.mark(), now()

    def on_range(self, what: What, start: int, end: int, marks: tuple[object, object] | None) -> None:
        self.events.append(_Event(what, start, end, threading.get_ident(), marks))

    def on_number(self, name: str, value: torch.Tensor) -> None:
        """Does nothing: numbers are for metrics."""

    def part(self) -> TracePart:
        """Returns everything, in the form that travels."""
        if self._timer is not None:
            self._group.backend.synchronize()
        numbers: dict[What, int] = {}
        threads = {self.thread: 0}
        events = []
        for what, start, end, thread, marks in self.events:
            number = numbers.setdefault(what, len(numbers))
            track = threads.setdefault(thread, len(threads))
            events.append((number, start, end, track, *self._on_device(marks)))
        group = self._group
        return TracePart(
            format=FORMAT,
            rank=group.ranks[group.rank],
            world_size=group.world_size,
            backend=group.backend.name,
            host=socket.gethostname(),
            process=os.getpid(),
            torch=f"{torch.__version__} ({platform.python_version()})",
            first_step=self._first_step,
            began=self.began,
            ended=self.ended or now(),
            threads=list(range(len(threads))),
            whats=[(w.kind, w.unit, w.ranks, w.nbytes) for w in numbers],
            events=events,
            steps=list(self.steps),
            clock=[(r.at, r.ahead, r.error) for r in self.clock],
        )

    def _on_device(self, marks: tuple[object, object] | None) -> tuple[float | None, float | None]:
        if marks is None or self._timer is None:
            return None, None
        (zero, at), timer = self._zero, self._timer
        return at + timer.seconds(zero, marks[0]) * 1e9, at + timer.seconds(zero, marks[1]) * 1e9


def part_path(path: Path, rank: int) -> Path:
    """Names the file in which a rank's own part is written if the ranks can't put theirs together."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def read_part(path: Path) -> TracePart:
    """Returns a part from its file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} is no trace: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "whats" not in found:
        raise DamagedFileError(f"{path} is no part of a trace of shardkit's (format {FORMAT})")
    part: TracePart = found  # type: ignore[assignment]
    return part
