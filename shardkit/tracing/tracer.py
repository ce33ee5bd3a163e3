"""Traces some steps of a training on all ranks, into one file: :func:`trace`, or the variable ``SHARDKIT_TRACE``."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..backend import Backend, Group, backend_of_job
from ..errors import ConfigurationError, RankMismatchError
from ..types import ProcessGroup
from .clocks import compare_clocks
from .layers import LayerWatch
from .merging import merged
from .ranges import listen, stop_listening
from .recording import Recorder, packed, part_path, unpacked, write_atomically
from .stepping import StepWatch, forget_data, hear_of_data

logger = logging.getLogger("shardkit")
VARIABLE = "SHARDKIT_TRACE"


class Tracer:
    """One rank's share in a trace.

    Args:
        path: the file that rank 0 writes.
        steps: which, counted from the first that ends after this object is made; None: from :meth:`begin` to
            :meth:`end`.
        group: the ranks.

    Attributes:
        path: the same.
        group: the same.
        is_done: the file is written.
    """

    def __init__(self, path: str | os.PathLike[str], steps: range | None, group: Group) -> None:
        self.path, self.group = Path(path), group
        self.is_done = False
        self._steps = _checked(steps)
        self._recorder: Recorder | None = None
        self._layers: LayerWatch | None = None
        self._watch = StepWatch(self._step_ended)
        if steps is None or steps.start == 0:
            try:
                self.begin()
            except BaseException:
                self._stop()
                raise

    # ------------------------------------------------------------ a trace's course
    def begin(self) -> None:
        """Records from now on (collective).

        Raises:
            RankMismatchError: ranks trace different steps.
        """
        plan = None if self._steps is None else [self._steps.start, self._steps.stop]
        said = self.group.channel("control").all_gather_bytes(
            json.dumps([plan, self._obstacle()]).encode(), label="which steps are traced"
        )
        plans, (obstacle, *_) = zip(*map(json.loads, said), strict=True)
        if obstacle or any(theirs != plans[0] for theirs in plans):
            self._stop()
        if obstacle:
            raise ConfigurationError(f"rank 0 can't write {self.path}: {obstacle}")
        if any(theirs != plans[0] for theirs in plans):
            each = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(plans))
            raise RankMismatchError(
                f"ranks trace different steps ({each}); pass the same steps= on all ranks"
            )
        reading = compare_clocks(self.group)
        self._recorder = Recorder(self.group, self._watch.count)
        self._recorder.clock.append(reading)
        self._layers = LayerWatch()
        hear_of_data()
        listen(self._recorder)

    def _obstacle(self) -> str:
        """Why rank 0 can't write the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
                return "it is a folder" if self.path.is_dir() else "its folder can't be written to"
        except OSError as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Records no more; rank 0 writes the file (collective)."""
        recorder = self._stop()
        if recorder is None:
            return
        recorder.clock.append(compare_clocks(self.group))
        parts = self.group.gather_object(packed(recorder.part()), 0, label="parts of a trace")
        self.is_done = True
        if parts is not None:
            write_atomically(self.path, json.dumps(merged([unpacked(part) for part in parts])))
            logger.info("%s has a trace of %d ranks: shardkit trace %s", self.path, len(parts), self.path)

    def abandon(self) -> None:
        """Records no more; each rank that has recorded anything writes its own part, for ``shardkit trace`` to put
        together."""
        recorder = self._stop()
        if recorder is not None and recorder.events:
            rank = self.group.ranks[self.group.rank]
            write_atomically(part_path(self.path, rank), json.dumps(recorder.part()))

    def _stop(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        self._watch.close()
        if self._layers is not None:
            self._layers.close()
        if recorder is not None:
            stop_listening(recorder)
            forget_data()
            recorder.stop()
        return recorder

    def _step_ended(self, count: int) -> None:
        if self._recorder is not None:
            self._recorder.note_step(count - 1)
        if self._steps is None:
            return
        if count == self._steps.stop:
            self.end()
        elif count == self._steps.start:
            self.begin()


def _checked(steps: range | None) -> range | None:
    if steps is None:
        return None
    if not isinstance(steps, range) or steps.step != 1 or len(steps) == 0 or steps.start < 0:
        raise ConfigurationError(
            f"steps={steps!r}: say which steps are traced as range(10, 12), for the eleventh and the twelfth"
        )
    return steps


@contextmanager
def trace(
    path: str | os.PathLike[str],
    steps: range | None = None,
    *,
    group: ProcessGroup = None,
    backend: str | Backend | None = None,
) -> Iterator[Tracer]:
    """Traces what is inside, or some steps of it, on all ranks (collective).

    ::

        with shardkit.trace("trace.json", steps=range(10, 12)):
            for batch in loader:
                ...

    Rank 0 writes one file for all ranks, that https://ui.perfetto.dev and chrome://tracing show and
    ``shardkit trace FILE`` explains: which rank waits for which other, in which unit, and why. A step ends with that of
    the optimizer that steps first. Where an error leaves the block, each rank writes its own part beside.

    Args:
        path: of the file.
        steps: counted from the beginning of the block; None: everything inside.
        group: the ranks; None for all.
        backend: theirs, by name or itself, where it is not that of the job's process group.

    Raises:
        ConfigurationError: ``steps`` is no range of at least one step; rank 0 can't write the file.
        RankMismatchError: ranks trace different steps.
    """
    tracer = Tracer(path, steps, backend_of_job(backend).group(group))
    try:
        yield tracer
    except BaseException:
        tracer.abandon()
        raise
    tracer.end()
    if not tracer.is_done:
        logger.warning(
            "nothing was traced: none of the %s began; a step ends with that of the optimizer that steps first",
            steps,
        )


# ------------------------------------------------------------ by the environment
_of_environment: dict[int, Tracer] = {}  # by thread: ranks may be threads of one process


def training_begins(group: Group) -> None:
    """Something is sharded by the calling rank: what ``SHARDKIT_TRACE`` asks for begins.

    Raises:
        ConfigurationError: the variable can't be read.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    everybody, me = group.backend.group(None), threading.get_ident()
    known = _of_environment.get(me)
    if known is not None and known.group is everybody:
        return
    steps, folder = read_plan(asked)
    _of_environment[me] = tracer = Tracer(folder / "trace.json", steps, everybody)
    atexit.register(tracer.abandon)  # a training that ends before the last of these steps


def read_plan(text: str, where: str = VARIABLE) -> tuple[range, Path]:
    """Reads ``steps=10:12,dir=/path``, which has both step 10 and step 12, as a range and a folder.

    Args:
        where: it was asked for, as errors name it.

    Raises:
        ConfigurationError: it is something else.
    """
    found = re.fullmatch(r"steps=(\d+):(\d+)(?:,dir=(.+))?", text.strip())
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigurationError(
            f"{where} {text!r}: write steps=FIRST:LAST, as steps=10:12 for the steps 10, 11 and 12 (the first is 0); "
            f"for the variable {VARIABLE} also where to, as steps=10:12,dir=runs/1"
        )
    return range(int(found[1]), int(found[2]) + 1), Path(found[3] or ".")
