"""Ranks on this machine's accelerator: torch_xla starts them, in a process of its own that can be ended.

torch_xla's own launcher waits for its ranks in their order, and for ever: one that fails leaves the others in a
collective, and nobody hears of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shardkit.errors import ConfigurationError, RankFailedError
from shardkit.types import AnyCallable, Args, T

from .child import describe_error, die_with_parent
from .objects import pack, unpack

_PAUSE = 0.2  # s between looks
_STACKS = 0.5  # s in which ranks write their stacks
_MOST = 8000  # characters of one


def launch(
    fn: Callable[..., T], world_size: int, args: Args, timeout: float | None, start_timeout: float | None
) -> list[T]:
    """``fn(rank, *args)`` on all devices, or on one of them for ``world_size`` 1; the results in rank order.

    Raises:
        ConfigurationError: ``world_size`` is another number.
        RankFailedError: a rank raised or died, or the time is over; all are ended.
    """
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="shardkit-xla-") as name:
        folder = Path(name)
        process = context.Process(target=_start, args=(theirs, fn, world_size, args, folder))
        process.start()
        theirs.close()
        try:
            return [
                unpack(data)
                for data in _wait(connection, folder, world_size, timeout, start_timeout, process.pid)
            ]
        finally:
            connection.close()
            _kill(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _wait(
    connection: multiprocessing.connection.Connection, folder: Path, world_size: int, timeout: float | None,
    start_timeout: float | None, process: int | None,
) -> list[bytes]:  # fmt: skip
    began = time.monotonic()
    name, limit, have_started = "start_timeout", start_timeout, False
    while not connection.poll(_PAUSE):
        for failed in folder.glob("failed-*"):
            raise pickle.loads(failed.read_bytes())
        if not have_started and len([*folder.glob("started-*")]) >= world_size:
            have_started, began, name, limit = True, time.monotonic(), "timeout", timeout
        if limit is not None and time.monotonic() - began >= limit:
            raise RankFailedError(
                0,
                "TimeoutError",
                f"no answer after {limit:g} s ({name}={limit:g})\n{_stacks(folder, process)}",
            )
    try:
        kind, payload = connection.recv()
    except EOFError:
        raise RankFailedError(
            0, "ProcessExited", "the process that starts the ranks ended; its output says why"
        ) from None
    for failed in folder.glob("failed-*"):
        raise pickle.loads(failed.read_bytes())
    if kind == "error":
        raise RankFailedError(0, *payload)
    return payload


def _stacks(folder: Path, process: int | None) -> str:
    _kill(process, signal.SIGUSR1)
    time.sleep(_STACKS)
    return "\n".join(f"{f.name}:\n{f.read_text()[-_MOST:]}" for f in sorted(folder.glob("rank-*")))


def _kill(group: int | None, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group is not None:
            os.killpg(group, number)


# ------------------------------------------------------------------ in that process, and in those of the ranks
def _start(
    connection: multiprocessing.connection.Connection,
    fn: AnyCallable,
    world_size: int,
    args: Args,
    folder: Path,
) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent()
    try:
        from torch_xla._internal import pjrt

        if world_size == 1:  # one device, however many there are
            results = [pjrt._run_singleprocess(_rank, fn, world_size, args, folder)]
        else:
            by_rank = pjrt.run_multiprocess(_rank, fn, world_size, args, folder)
            results = [by_rank[rank] for rank in sorted(by_rank)]
        connection.send(("results", results))
    except BaseException:  # noqa: BLE001 - the process ends here, and has nobody else to tell
        connection.send(("error", describe_error()))


def _rank(fn: AnyCallable, world_size: int, args: Args, folder: Path) -> bytes:
    import torch_xla.runtime as runtime

    size = runtime.world_size()
    rank = runtime.global_ordinal() if size > 1 else 0
    try:
        if size != world_size:
            raise ConfigurationError(
                f"rank {rank}: launched with world_size={world_size}, but there are {size} devices; pass "
                f"world_size={size}"
            )
        faulthandler.register(signal.SIGUSR1, (folder / f"rank-{rank}").open("w"), all_threads=True)
        (folder / f"started-{rank}").touch()
        return pack(fn(rank, *args), to_host=True)
    except ConfigurationError as error:
        failure: Exception = error if size != world_size else _failed(rank, error)
    except Exception as error:  # noqa: BLE001 - it is the caller's to judge
        failure = _failed(rank, error)
    whole = folder / f"failed-{rank}"
    part = folder / f"part-{rank}"
    part.write_bytes(pickle.dumps(failure))
    part.rename(whole)  # seen at once, whatever the other ranks wait for
    raise failure from None


def _failed(rank: int, error: Exception) -> RankFailedError:
    return RankFailedError(rank, type(error).__name__, traceback.format_exc())
