"""Output of a run on the terminal: rank 0's output, a line about its progress, and the page about a failure."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...checkpoint.format import folders
from ...errors import CONSEQUENCES
from ...launching.run_folder import RunFolder, steps_of
from ...tracing.tables import counted

_EVERY = 0.5  # seconds between progress lines
_CHUNK = 1 << 16
_WIDTH = 100  # of the page about a failure
_OTHERS = 16  # ranks of which it has a line


class News:
    """The agent's thread reports; the main thread shows.

    Args:
        folder: where pages are kept.
    """

    def __init__(self, run: str, folder: RunFolder) -> None:
        self.run, self.folder = run, folder
        self._lock = threading.RLock()
        self._outputs: list[tuple[io.BufferedReader, IO[str]]] = []
        self._attempt: Path | None = None
        self._ranks: list[int] = []
        self._world_size = 0
        self._shown = 0.0
        self._line = ""
        self._rate: list[tuple[float, int]] = []  # times and steps of the last seconds
        self._began = time.monotonic()

    # ------------------------------------------------------------ from the agent's thread
    def attempt(self, folder: Path, ranks: list[int], world_size: int) -> None:
        with self._lock:
            self.show_outputs()
            self._attempt, self._ranks, self._world_size, self._rate = folder, ranks, world_size, []
            self._outputs = []
            if 0 in ranks:
                for ending, stream in ((".out", sys.stdout), (".err", sys.stderr)):
                    path = folder / f"rank0{ending}"
                    path.touch()
                    self._outputs.append((path.open("rb"), stream))

    def say(self, text: str) -> None:
        """Writes a line of the run's own."""
        with self._lock:
            self.show_outputs()
            self._clear()
            print(f"shardkit run: {text}", file=sys.stderr, flush=True)

    def page(
        self,
        headline: str,
        attempt: int,
        cause: Failure | None,
        others: dict[int, str],
        checkpoint: Path | None,
        next_step: str,
        note: str,
    ) -> None:
        """Shows the page about a failure, and keeps it.

        Args:
            headline: what happened, in a line.
            cause: the rank that failed first, if one did.
            others: a sentence about each other rank.
            checkpoint: the last complete one.
            next_step: what happens now, or the command that resumes.
            note: further lines.
        """
        where = f"run {self.run}, attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        if cause is not None:
            steps = cause.steps
            where += f", after optimizer step {steps} of this attempt" if steps else ", before the first step"
        lines = ["=" * _WIDTH, headline, where]
        for shown in ("" if cause is None else cause.trace, note):
            lines += ["", shown] if shown else []
        if others:
            lines += ["", "The others:"]
            lines += [f"  rank {rank} {text}" for rank, text in sorted(others.items())[:_OTHERS]]
            if len(others) > _OTHERS:
                lines.append(f"  ... and {len(others) - _OTHERS} more")
        lines += ["", f"Last complete checkpoint: {checkpoint or 'none'}", next_step]
        if cause is not None:
            lines.append(f"Its output: {cause.files}.out, {cause.files}.err")
        text = "\n".join([*lines, "=" * _WIDTH, ""])
        with self._lock, contextlib.suppress(OSError):
            self.show_outputs()
            self._clear()
            (self.folder.path / "failure.txt").write_text(text)
            sys.stderr.write(text)
            sys.stderr.flush()

    # ------------------------------------------------------------ from the main thread
    def show_outputs(self) -> None:
        """Shows what rank 0 has printed since."""
        with self._lock:
            for file, stream in self._outputs:
                while chunk := file.read(_CHUNK):
                    if stream is sys.stderr and (end := self._last_words()) is not None:
                        chunk = chunk[: max(0, end - file.tell() + len(chunk))]
                    self._clear()
                    stream.write(chunk.decode(errors="replace"))
                    stream.flush()

    def _last_words(self) -> int | None:
        """Finds the traceback that has ended rank 0 in what it printed: the page says what matters of it."""
        try:
            error = json.loads((self._attempt / "rank0.error.json").read_text())  # type: ignore[operator]
            return int(error["message"]["extraInfo"]["printed"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def show(self) -> None:
        with self._lock:
            self.show_outputs()
            if sys.stderr.isatty() and time.monotonic() - self._shown >= _EVERY:
                self._shown = time.monotonic()
                self._clear()
                self._line = self._progress()
                sys.stderr.write(self._line)
                sys.stderr.flush()

    def close(self) -> None:
        with self._lock:
            self.show_outputs()
            self._clear()

    def _progress(self) -> str:
        if self._attempt is None:
            waited = time.monotonic() - self._began
            return f"[{self.run}: waits for other machines, {waited:.0f} s]" if waited > 2 else ""
        steps = [steps_of(self._attempt / f"rank{rank}.steps")[0] for rank in self._ranks]
        least, now = min(steps, default=0), time.monotonic()
        self._rate = [(t, s) for t, s in self._rate if now - t < 10] + [(now, least)]
        seconds = now - self._rate[0][0]
        rate = (least - self._rate[0][1]) / seconds if seconds else 0.0
        saved = last_checkpoint(self.folder)
        last = f", last checkpoint {saved.name}" if saved else ""
        return f"[{self.run}: {counted(self._world_size, 'rank')}, step {least}, {rate:.3g} steps/s{last}]"

    def _clear(self) -> None:
        if self._line:
            sys.stderr.write("\r" + " " * len(self._line) + "\r")
            self._line = ""


# ------------------------------------------------------------ which rank was the cause, and what is said about each
STOPPED = 75  # EX_TEMPFAIL: the program was asked to stop, has saved, and can be started again
_OF_GLOO = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe")
_INSIDE = re.compile(r" \(\[/.*\)$")  # where in gloo's source it was found
_LINES, _LETTERS = 40, 600  # of a traceback, and of a message


@dataclass(frozen=True)
class Failure:
    """A rank that has failed, or has made others fail.

    Attributes:
        rank: global.
        status: exit status; negative: the signal that ended it.
        noticed: when that was seen (seconds since the epoch).
        files: path of its files, without their endings.
        fault: what it did, where it is no error of its own: it hangs, or left too early.
    """

    rank: int
    pid: int
    status: int
    noticed: float
    files: Path
    fault: str = ""

    def _error(self) -> dict[str, str]:
        """Returns the exception, as the rank wrote it down; empty if it could not."""
        try:
            message = json.loads(self.files.with_suffix(".error.json").read_text())["message"]
            extra = message["extraInfo"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        time_of_it = str(extra.get("time", ""))
        return {"text": message["message"], "trace": extra["py_callstack"], "time": time_of_it}

    @property
    def when(self) -> float:
        return float(self._error().get("time") or self.noticed)

    @property
    def error_text(self) -> str:
        """Returns the exception in a line; "" if the rank wrote none down."""
        return _INSIDE.sub("", self._error().get("text", "").strip().partition("\n")[0])[:_LETTERS]

    @property
    def text(self) -> str:
        """Returns the exception, or how the process ended, in a line."""
        if self.error_text:
            return self.error_text
        if self.status < 0:
            number = -self.status
            known = number in set(signal.Signals)
            name = signal.Signals(number).name if known else f"signal {number}"
            return f"ended by {name}{_KNOWN.get(number, '')}"
        return f"ended with exit status {self.status}"

    @property
    def headline(self) -> str:
        """Says what became of it, after "rank N of M"."""
        return self.fault or f"failed: {self.text}"

    @property
    def steps(self) -> int:
        """Counts the steps of an optimizer that it has made."""
        return steps_of(self.files.with_suffix(".steps"))[0]

    @property
    def trace(self) -> str:
        """Returns the traceback, or the last lines that it printed."""
        trace = self._error().get("trace", "").rstrip()
        printed = tail(self.files.with_suffix(".err"), 15)
        lines = trace.splitlines() or [line for line in printed if not line.startswith("[W")]
        if len(lines) > _LINES:
            lines = [*lines[:5], f"  ... {len(lines) - _LINES} lines", *lines[5 - _LINES :]]
        return "\n".join(lines)

    @property
    def is_consequence(self) -> bool:
        """Says whether it says no more than that another rank is gone."""
        text = "" if self.fault else self._error().get("text", "")
        return text.startswith(CONSEQUENCES) or bool(_OF_GLOO.search(text))


_KNOWN = {
    int(signal.SIGKILL): (
        " (from outside: the kernel does so where memory is short, see dmesg; schedulers do so at limits)"
    ),
    int(signal.SIGSEGV): " (a crash in compiled code)",
    int(signal.SIGABRT): " (compiled code gave up; what it printed says why)",
    int(signal.SIGBUS): " (mostly: /dev/shm is full, or a mapped file was cut)",
}


def first_cause(failures: list[Failure], left: list[Failure] | None = None) -> Failure:
    """Returns the earliest one that is no consequence of another's.

    Args:
        left: ranks that ended with status 0. Where those that failed have only lost another rank, it is one of these
            that they have lost, unless most ranks have ended so: then the others do more than all have agreed on.
    """
    cause = min(failures, key=lambda f: (f.is_consequence, f.when))
    if left and cause.is_consequence and len(left) <= len(failures):
        return min(left, key=lambda f: (f.steps, f.when))
    return cause


def tail(path: Path, lines: int) -> list[str]:
    """Returns the last lines of a file."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def last_checkpoint(run: RunFolder) -> Path | None:
    """Returns the complete checkpoint of the most steps that ranks of a run have saved; None if there is none."""
    found = [item for folder in run.checkpoint_dirs() for item in folders.complete(folder).items()]
    return Path(max(found)[1]) if found else None


def where_it_stood(files: Path) -> str:
    """Reads what a rank's thread for questions has written, or what faulthandler has; "" if neither."""
    try:
        text = files.with_suffix(".where").read_text().strip()
    except OSError:
        text = ""
    if text:
        return text
    for line in tail(files.with_suffix(".stacks"), 60):
        name = line.strip()
        if name.startswith('File "') and "/torch/" not in name and "/shardkit/" not in name:
            return f"stood at {name}"
    return ""
