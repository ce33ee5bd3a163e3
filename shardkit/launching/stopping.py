"""SIGTERM as a request: all ranks learn of it at the same step, save, and end.

[Note: agreeing to stop] The signal comes to ranks at different moments, or to one alone, and a rank that stopped a step
before the others would leave them in a collective. So all ranks exchange whether they were asked, in calls of
:func:`stop_requested` that all of them know beforehand: the exchange also says how many calls lie until the next one,
so that there is one about every second. Other calls cost an addition. Nothing is sent where there is one rank.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import torch

from ..backend import Group, ReduceOp, backend_of_job
from ..errors import ConfigurationError, LifecycleError

_SECONDS = 1.0  # between exchanges
_MOST = 10_000  # calls
_GROWTH = 4  # of the number of calls, from exchange to exchange


class _Stopping:
    """State of one process. Ranks that are threads share the request, and count calls each for itself."""

    def __init__(self) -> None:
        self.is_asked = False
        self._installed = 0  # the process that has the handler
        self._counts = threading.local()

    def install(self) -> None:
        """Takes the first SIGTERM from now on for a request; another one ends the process."""
        if self._installed == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        self._installed = os.getpid()
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._signalled)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self.is_asked = True
        signal.signal(number, signal.SIG_DFL)

    def requested(self, group: Group | None) -> bool:
        """Counts a call; exchanges when it is time."""
        if group is None or group.world_size == 1:
            return self.is_asked
        counts = self._counts
        is_known = getattr(counts, "group", None) is group
        if not is_known:
            counts.group, counts.left, counts.calls, counts.answer = group, 0, 1, False
            counts.since = time.monotonic()
        if counts.answer:
            return True
        if counts.left:
            counts.left -= 1
            return False
        self._exchange(group)
        return bool(counts.answer)

    def _exchange(self, group: Group) -> None:
        """Tells that this rank was asked, and how many calls take a second: the slowest rank's counts (collective)."""
        counts, now = self._counts, time.monotonic()
        rate = counts.calls / max(now - counts.since, 1e-6)
        wanted = max(1, min(int(rate * _SECONDS), _GROWTH * counts.calls, _MOST))
        told = torch.tensor([int(self.is_asked), -wanted], dtype=torch.int64, device=group.backend.device())
        group.channel("control").all_reduce(told, op=ReduceOp.MAX, label="whether to stop")
        asked, wanted = (int(x) for x in told.tolist())
        counts.answer, counts.calls, counts.left, counts.since = bool(asked), -wanted, -wanted - 1, now


_stopping = _Stopping()


def stop_requested() -> bool:
    """Says whether the job was asked to stop, by SIGTERM to ``shardkit run`` or to any rank: the same on all ranks.

    To be called by all ranks once a step, between steps. When it says yes, save a checkpoint and end with status 75
    (``sys.exit(75)``), which says that the job can be started again::

        for batch in batches:
            ...
            if shardkit.stop_requested():
                shardkit.save_training(folder, model=model, optimizer=optimizer, step=step)
                sys.exit(75)

    About once a second ranks exchange two numbers; all other calls are a few Python operations. So a request is heard
    after about a second and a step. Until the first call SIGTERM ends a rank as usual, and so does a second SIGTERM.
    From the first call on, a handler of the program's own for SIGTERM stays in place, and this says no.

    Ranks are those of the default process group; without one the process is alone.
    """
    _stopping.install()
    return _stopping.requested(_group())


def _group() -> Group | None:
    dist = torch.distributed
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    known = getattr(_known, "group", None)
    if known is not None and known[0] is world and world is not None:
        return known[1]  # type: ignore[no-any-return]
    try:
        group = backend_of_job().group()
    except (ConfigurationError, LifecycleError):
        return None
    _known.group = world, group
    return group


_known = threading.local()
