"""How a wait in a collective of torch's that another rank will not come to is ended."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardkit.errors import OutOfStepError

from .thread_position import ThreadPosition, position_of

logger = logging.getLogger("shardkit")
_LAST_WORDS = 5.0  # seconds that a broken wait gets to raise
_LOOK = 0.25  # seconds between looks, and
_MOMENT = 1.0  # after the thread has moved
_NOTHING = datetime.timedelta(milliseconds=1)


def end_vain_wait(
    thread: int, position: ThreadPosition, message: str, break_waits: Callable[[], object] | None = None
) -> None:
    """Ends this rank's wait in a collective of torch's, or for its device, that another one will not come to.

    The thread raises OutOfStepError. If it can't be reached, the process ends, as NCCL's watchdog would do it.
    """
    logger.error("%s", message)
    if position.operation or break_waits is None:
        end_wait(thread, position.group, OutOfStepError, message)
    else:
        _raise_in(thread, OutOfStepError, message)
        break_waits()
    until = time.monotonic() + _LAST_WORDS
    while time.monotonic() < until:
        time.sleep(_LOOK)
        now = position_of(thread)
        if now is None or now.mark != position.mark:
            time.sleep(_MOMENT)
            take_back(thread)
            return
    print(f"{message}\nIts wait can't be ended, so this process ends.", file=sys.stderr, flush=True)
    os._exit(1)


def end_wait(thread: int, group: str, error: type[Exception], message: str) -> None:
    """Makes a thread that waits in a collective of torch's raise ``error``.

    The exception is delivered when the thread runs Python again, which torch.distributed's functions do before they
    pass an error on. A caller that waits for a work itself gets torch's own error: ours would come to it in the middle
    of whatever it does about that. So that the wait ends, the group's connections are broken: with gloo by a receive
    that is given no time, which closes them, with NCCL by its own abort.
    """
    if group:
        _raise_in(thread, error, message)
    for pg in list(dist.distributed_c10d._world.pg_map):
        if group in ("", str(pg.group_name)):
            _break(pg)


def _raise_in(thread: int, error: type[Exception], message: str) -> None:
    kind = type(error.__name__, (error,), {"__init__": lambda self: error.__init__(self, message)})
    kind.__module__, kind.__qualname__ = error.__module__, error.__qualname__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def take_back(thread: int) -> None:
    """The thread has raised another error already: this one would come at a moment that nobody expects."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def _break(pg: dist.ProcessGroup) -> None:
    other = next((r for r in range(pg.size()) if r != pg.rank()), None)
    for device in pg._device_types:
        backend = pg._get_backend(device)
        with contextlib.suppress(RuntimeError):
            if backend.name() != "gloo":
                backend.abort()
            elif other is not None:
                backend.recv([torch.empty(1)], other, 0x5AFE).wait(_NOTHING)  # type: ignore[attr-defined]
