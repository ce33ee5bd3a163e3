"""A progress bar where there is a terminal and rich is installed; else a line now and then."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows nothing: what ranks other than 0 use."""

    def advance(self) -> None:
        """One more step is done."""

    def show_loss(self, loss: float) -> None:
        """The latest loss."""

    def note_loss(self, loss: float) -> None:
        """The latest loss, which somebody has asked to see."""
        self.show_loss(loss)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class PlainProgress(Progress):
    """Lines of text, for logs."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.loss = title, total, 0, ""
        self.printed = time.monotonic()

    def advance(self) -> None:
        self.done += 1
        if time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
            self.print_line()

    def show_loss(self, loss: float) -> None:
        self.loss = f", loss {loss:.4f}"

    def note_loss(self, loss: float) -> None:
        self.show_loss(loss)
        self.print_line()

    def print_line(self) -> None:
        self.printed = time.monotonic()
        print(f"{self.title}: step {self.done}/{self.total}{self.loss}", flush=True)

    def __exit__(self, *error: object) -> None:
        self.print_line()


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

        self.bar = Bar(
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task(title, total=total, loss="loss ......")

    def advance(self) -> None:
        self.bar.advance(self.task)

    def show_loss(self, loss: float) -> None:
        self.bar.update(self.task, loss=f"loss {loss:.4f}")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def progress_bar(title: str, total: int) -> Progress:
    """The best that standard output can show."""
    if sys.stdout.isatty():
        try:
            return RichProgress(title, total)
        except ImportError:
            pass
    return PlainProgress(title, total)
