"""Output of a run on the terminal: rank 0's output, a line about its progress, and the page about a failure."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ...launching.run_folder import RunFolder, steps_of
from ...tracing.tables import counted
from .causes import Page

_EVERY = 0.5  # seconds between progress lines
_CHUNK = 1 << 16


class News:
    """The agent's thread reports; the main thread shows.

    Args:
        folder: where pages are kept.
    """

    def __init__(self, run: str, folder: RunFolder) -> None:
        self._run, self._folder = run, folder
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

    def page(self, page: Page) -> None:
        text = page.text()
        with self._lock, contextlib.suppress(OSError):
            self.show_outputs()
            self._clear()
            self._folder.page.write_text(text)
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
            return f"[{self._run}: waits for other machines, {waited:.0f} s]" if waited > 2 else ""
        steps = [steps_of(self._attempt / f"rank{rank}.steps")[0] for rank in self._ranks]
        least, now = min(steps, default=0), time.monotonic()
        self._rate = [(t, s) for t, s in self._rate if now - t < 10] + [(now, least)]
        seconds = now - self._rate[0][0]
        rate = (least - self._rate[0][1]) / seconds if seconds else 0.0
        saved = self._folder.last_checkpoint()
        last = f", last checkpoint {saved.name}" if saved else ""
        return f"[{self._run}: {counted(self._world_size, 'rank')}, step {least}, {rate:.3g} steps/s{last}]"

    def _clear(self) -> None:
        if self._line:
            sys.stderr.write("\r" + " " * len(self._line) + "\r")
            self._line = ""
