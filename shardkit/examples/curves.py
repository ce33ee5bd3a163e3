"""Curves of learning: numbers of each epoch, for TensorBoard or as lines of JSON."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.tracing.metrics import Sink
from shardkit.tracing.sinks import JsonLines, TensorBoard


class Curves:
    """Writes nothing: without ``--logdir``, and on ranks other than 0."""

    def write(self, epoch: int, **values: float) -> None:
        """Numbers of an epoch, by name."""


class WrittenCurves(Curves):
    """Writes to a sink of :mod:`shardkit.tracing.sinks`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, epoch: int, **values: float) -> None:
        self._sink.write({"step": epoch, "time": time.time(), **values})


@contextmanager
def curves_in(logdir: str | None, rank: int) -> Iterator[Curves]:
    """Those of a run; says where they are if that is not what one expects."""
    if logdir is None or rank:
        yield Curves()
        return
    sink: Sink
    if importlib.util.find_spec("tensorboard") is not None:
        sink = TensorBoard(logdir)
    else:
        path = Path(logdir) / "metrics.jsonl"
        print(
            f"tensorboard is not installed (pip install tensorboard): curves are in {path}",
            flush=True,
        )
        sink = JsonLines(path)
    try:
        yield WrittenCurves(sink)
    finally:
        sink.close()
