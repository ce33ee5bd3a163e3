"""A progress bar where there is a terminal and rich is installed; else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows nothing: what ranks other than 0 use."""

    def advance(self) -> None:
        """One more step is done."""

    def show_loss(self, loss: float) -> None:
        """The latest loss."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class PlainProgress(Progress):
    """Lines of text, for logs."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.loss = title, total, 0, float("nan")
        self.printed = time.monotonic()

    def advance(self) -> None:
        self.done += 1
        if self.done == self.total or time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(f"{self.title}: step {self.done}/{self.total}, loss {self.loss:.4f}", flush=True)

    def show_loss(self, loss: float) -> None:
        self.loss = loss


class RichProgress(Progress):
    """A bar with the latest loss and the time left."""

    def __init__(self, title: str, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self.bar: Any = Bar(
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task(title, total=total, loss=float("nan"))

    def advance(self) -> None:
        self.bar.advance(self.task)

    def show_loss(self, loss: float) -> None:
        self.bar.update(self.task, loss=loss)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def progress_bar(title: str, total: int) -> Progress:
    """The best that standard output can show."""
    if sys.stdout.isatty():
        try:
            return RichProgress(title, total)
        except ImportError:
            pass
    return PlainProgress(title, total)
