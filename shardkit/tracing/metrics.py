"""Numbers of a training, while it runs: how fast it is, what it sends, how long it waits."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from ..backend import Backend, Group, backend_of_job
from ..errors import ConfigurationError, LifecycleError
from ..types import Framework, ProcessGroup
from .ranges import What, listen, now, stop_listening
from .timeline import WAITING, is_collective, part_path

Number: TypeAlias = float | int | torch.Tensor
Record: TypeAlias = dict[str, float | int]
_SUMS = ("tokens_per_s", "samples_per_s", "gathered_bytes", "reduced_bytes")
_MOST = ("step_time_s", "peak_memory_bytes", "time", "step")


@runtime_checkable
class Sink(Protocol):
    """Takes records; any callable will do, too."""

    def write(self, record: Record) -> None:
        """Takes one record: ``step``, ``time`` (seconds since 1970), and numbers by name."""

    def close(self) -> None:
        """Hears that no more records come."""


class Metrics:
    """Writes numbers of a training every few steps.

    ::

        metrics = shardkit.Metrics("metrics.jsonl", every=10)
        for batch in loader:
            loss = model(batch).mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            metrics.step(loss=loss, tokens=batch.numel())
        metrics.close()

    A record has ``step``, ``time``, ``step_time_s``, ``gathered_bytes`` and ``reduced_bytes`` (that come from and go to
    other ranks, before compression), ``exposed_wait_s`` (waiting that nothing hides), ``peak_memory_bytes`` (of the
    device, or of the process), and where they are known ``gradient_norm`` (of the last clipping), ``loss`` (the mean),
    ``tokens_per_s`` and ``samples_per_s``: for one step, the mean since the last record.

    Args:
        *sinks: names of files (JSON lines are appended), callables that take a record, or objects with
            ``write(record)`` and ``close()``, as :class:`TensorBoard`.
        every: steps between records. Tensors are read then, so that the host waits for the device once.
        over_ranks: numbers of all ranks together, by one small collective for each record: sums of rates and bytes,
            the mean loss, the longest step, the largest memory, and ``waited_for_rank``, which waits the least. Else
            they are rank 0's own, without any collective.
        per_rank: every rank writes its own records, to ``metrics.rank-3.jsonl`` for a file's name ``metrics.jsonl``.
        group: the ranks; None for all.
        backend: theirs, by name or itself, where it is not that of the job's process group.

    Raises:
        ConfigurationError: no sink, something that is none, or ``every`` below 1.
    """

    def __init__(
        self,
        *sinks: str | os.PathLike[str] | Sink | Callable[[Record], object],
        every: int = 1,
        over_ranks: bool = False,
        per_rank: bool = False,
        group: ProcessGroup = None,
        backend: str | Backend | None = None,
    ) -> None:
        if every < 1:
            raise ConfigurationError(f"every={every}: write a record every so many steps, 1 or more")
        if over_ranks and per_rank:
            raise ConfigurationError("over_ranks and per_rank exclude each other")
        self._group: Group = backend_of_job(backend).group(group)
        self._every, self._over_ranks = every, over_ranks
        self._writes = per_rank or self._group.rank == 0
        checked = [_sink(sink, self._group.rank if per_rank else None) for sink in sinks]
        if not checked:
            raise ConfigurationError("Metrics needs somewhere to write: a file's name, or a callable")
        self._sinks = [make() for make in checked] if self._writes else []
        self._timer = self._group.backend.timer()
        self.mark = None if self._timer is None else self._timer.mark
        self._count = 0
        self._is_open = True
        self._forget()
        listen(self)

    # ------------------------------------------------------------ what is heard
    def on_range(self, what: What, start: int, end: int, marks: tuple[object, object] | None) -> None:
        """Adds a range that has ended: bytes of a collective, and the device's marks around it."""
        if what.nbytes and is_collective(what.kind):
            share = what.nbytes * (len(what.ranks) - 1) / len(what.ranks)
            if what.kind == "all_gather":
                self._gathered += share
            else:
                self._reduced += share
        if what.kind.endswith(".wait") or what.kind in WAITING:
            self._waited += (end - start) / 1e9
            if marks is not None:
                self._marks.append(marks)

    def on_number(self, name: str, value: torch.Tensor) -> None:
        """Keeps a number of the step, as the norm of gradients."""
        self._more[name] = value.detach()

    # ------------------------------------------------------------ steps
    def step(
        self,
        *,
        loss: Number | None = None,
        tokens: int | None = None,
        samples: int | None = None,
        **more: Number,
    ) -> None:
        """Notes that a step has ended; with ``over_ranks``, a collective every ``every`` steps.

        Args:
            tokens, samples: that this rank has computed with in it.
            **more: written as they are.

        Raises:
            LifecycleError: they are closed.
        """
        if not self._is_open:
            raise LifecycleError("these Metrics are closed")
        self._count += 1
        self._steps += 1
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._tokens += tokens or 0
        self._samples += samples or 0
        self._more.update({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in more.items()})
        if self._count % self._every == 0:
            self._write()

    def close(self) -> None:
        """Writes no more."""
        if self._is_open:
            self._is_open = False
            stop_listening(self)
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forget(self) -> None:
        self._began = now()
        self._steps = self._tokens = self._samples = 0
        self._gathered = self._reduced = self._waited = 0.0
        self._losses: list[Number] = []
        self._marks: list[tuple[object, object]] = []
        self._more: dict[str, Number] = {}

    def _write(self) -> None:
        if not self._writes and not self._over_ranks:
            self._forget()
            return
        record = self._record()
        self._forget()
        if self._over_ranks and self._group.world_size > 1:
            control = self._group.channel("control")
            sent = control.all_gather_bytes(json.dumps(record).encode(), label="metrics")
            record = of_ranks([json.loads(data) for data in sent])
        for sink in self._sinks:
            sink.write(record)

    def _record(self) -> Record:
        if self._timer is not None:
            self._group.backend.synchronize()
            on_device = sum(self._timer.seconds(first, second) for first, second in self._marks)
            self._waited = max(self._waited, on_device)
        seconds, steps = (now() - self._began) / 1e9, self._steps
        device, counted = self._group.backend.device(), torch.accelerator.current_accelerator()
        if counted is not None and device.type == counted.type:
            peak = int(torch.accelerator.max_memory_allocated(device))
        else:  # of the process; not in bytes but on macOS
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        record: Record = {
            "step": self._count,
            "time": time.time(),
            "step_time_s": seconds / steps,
            "gathered_bytes": round(self._gathered / steps),
            "reduced_bytes": round(self._reduced / steps),
            "exposed_wait_s": self._waited / steps,
            "peak_memory_bytes": peak,
        }
        if self._losses:
            record["loss"] = _mean(self._losses)
        if self._tokens:
            record["tokens_per_s"] = self._tokens / seconds
        if self._samples:
            record["samples_per_s"] = self._samples / seconds
        for name, value in self._more.items():
            record[name] = value.item() if isinstance(value, torch.Tensor) else value
        return record


def _mean(values: Sequence[Number]) -> float:
    tensors = [value.float().mean() for value in values if isinstance(value, torch.Tensor)]
    total = float(torch.stack(tensors).sum()) if tensors else 0.0
    return (total + sum(float(v) for v in values if not isinstance(v, torch.Tensor))) / len(values)


def _sink(
    given: str | os.PathLike[str] | Sink | Callable[[Record], object], rank: int | None
) -> Callable[[], Sink]:
    """Makes a sink of what was given, on ranks that write."""
    if isinstance(given, str | os.PathLike):
        return lambda: JsonLines(given, rank)
    if isinstance(given, Sink):
        return lambda: given
    if callable(given):
        return lambda: SimpleNamespace(write=given, close=lambda: None)  # nothing is open
    raise ConfigurationError(
        f"{given!r} is no place for metrics: pass a file's name, a callable that takes a record, or an object with "
        "write(record) and close()"
    )


def of_ranks(records: Sequence[Record]) -> Record:
    """Sums rates and bytes, takes times and memory of the rank that has most, and the mean of everything else."""
    found: Record = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        if name in _SUMS:
            found[name] = sum(values)
        elif name in _MOST:
            found[name] = max(values)
        else:
            found[name] = sum(values) / len(values)
    waits = [record["exposed_wait_s"] for record in records]
    found["exposed_wait_s_max"] = max(waits)
    found["waited_for_rank"] = waits.index(min(waits))  # the others wait for who waits least
    return found


# ------------------------------------------------------------ sinks
class JsonLines:
    """Appends records to a file, each a line of JSON; what is no finite number is a string ("nan").

    Args:
        rank: becomes a part of the name.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        path = Path(path)
        if rank is not None:
            path = part_path(path, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Writes a line, which is there when this returns."""
        shown = {k: v if math.isfinite(v) else str(v) for k, v in record.items()}
        self._file.write(json.dumps(shown) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Writes event files of TensorBoard's.

    Raises:
        ConfigurationError: tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "metrics for TensorBoard need tensorboard: pip install tensorboard"
            ) from error
        self._open = lambda: SummaryWriter(os.fspath(folder))  # type: ignore[no-untyped-call]
        self._writer: Framework = None

    def write(self, record: Record) -> None:
        """Writes one scalar for each number."""
        if self._writer is None:  # on the rank that writes
            self._writer = self._open()
        for name, value in record.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, int(record["step"]), walltime=record["time"])
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
