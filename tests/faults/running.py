"""Runs cases on processes of their own, several at a time: most of a case's time is spent waiting.

[Note: nobody leaves early] A rank that has raised stays: if it ended, its connections would break, and tell the others.
When all ranks have said how they ended, or the time is over, they are killed. One that hangs where it should not is
asked for its stacks before.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.cases import Case

AT_ONCE = 6  # cases
START_SECONDS = 90.0
_TICK = 0.02
HANGS = "hangs"
KILLED = "killed"


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        kind: name of the error's class; "" for none; :data:`KILLED`; :data:`HANGS`.
        text: of the error; where it hangs.
        seconds: from the first step's end on.
        late: by how many seconds a thread of the process that only sleeps was woken too late meanwhile, in sum.
    """

    rank: int
    kind: str
    text: str
    seconds: float
    late: float = 0.0


class Pace:
    """How much the machine holds this process up: what a sleeping thread has lost since."""

    def __init__(self) -> None:
        self.late = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(_TICK)
            self.late += time.monotonic() - began - _TICK


def _rank(case: Case, strategy: str, rank: int, folder: str, answers: Connection) -> None:
    """The process of one rank."""
    import torch
    import torch.distributed as dist

    from tests.faults.trainers import make_trainer

    faulthandler.register(signal.SIGUSR1, open(_stacks(folder, rank), "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    program = getattr(importlib.import_module("tests.faults.programs"), case.program)
    store = dist.FileStore(f"{folder}/store", case.world_size)
    limit = {} if case.timeout is None else {"timeout": datetime.timedelta(seconds=case.timeout)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, **limit)
    trainer: Any = strategy
    if case.begins:
        trainer = make_trainer(strategy)
        trainer.step()
    dist.barrier()
    answers.send("started")
    began, pace = time.monotonic(), Pace()
    kind, text = "", ""
    try:
        program(rank, trainer)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    answers.send(Outcome(rank, kind, text, time.monotonic() - began, pace.late))
    time.sleep(600)  # see [Note: nobody leaves early]


def run_case(case: Case, strategy: str, limit: float) -> list[Outcome]:
    """Each rank's outcome.

    Args:
        limit: seconds after which a rank that said nothing hangs.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    ranks, connections = [], []
    with tempfile.TemporaryDirectory(prefix="shardkit-faults-") as folder:
        try:
            for rank in range(case.world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_rank, args=(case, strategy, rank, folder, there), daemon=True
                )
                process.start()
                there.close()
                ranks.append(process)
                connections.append(here)
            stays = {r for r, kinds in enumerate(case.errors) if HANGS in kinds}
            outcomes = _collect(connections, limit, stays)
            return [
                o._replace(text=_where(ranks[o.rank].pid, _stacks(folder, o.rank)))
                if o.kind == HANGS and o.rank not in stays
                else o
                for o in outcomes
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _stacks(folder: str, rank: int) -> str:
    return f"{folder}/stacks{rank}"


def _where(pid: int, path: str) -> str:
    """Where the threads of a process stand."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
    return Path(path).read_text()


def _collect(connections: list[Connection], limit: float, stays: set[int]) -> list[Outcome]:
    started = time.monotonic()
    for rank, connection in enumerate(connections):
        if not connection.poll(max(0.0, started + START_SECONDS - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not get through its first step")
        connection.recv()
    began = time.monotonic()
    outcomes = [Outcome(r, HANGS, "", limit) for r in range(len(connections))]
    open_ = dict(enumerate(connections))
    while open_.keys() - stays and time.monotonic() < began + limit:
        ready = wait(list(open_.values()), max(0.0, began + limit - time.monotonic()))
        for rank in [r for r, c in open_.items() if c in ready]:
            connection = open_.pop(rank)
            try:
                outcomes[rank] = connection.recv()
            except EOFError:
                outcomes[rank] = Outcome(rank, KILLED, "", time.monotonic() - began)
    return outcomes


_executor = ThreadPoolExecutor(AT_ONCE)
_submitted: dict[tuple[str, str], Future[list[Outcome]]] = {}


def submit(case: Case, strategy: str, limit: float) -> Future[list[Outcome]]:
    """Starts a case soon, once."""
    key = (case.name, strategy)
    if key not in _submitted:
        _submitted[key] = _executor.submit(run_case, case, strategy, limit)
    return _submitted[key]
