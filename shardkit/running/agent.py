"""torch's elastic agent, with a look at what happened before ranks that are left are ended.

The agent of torch restarts ranks and lets machines meet; its methods are overridden where it monitors, meets and
restarts. It would end all ranks of the machine as soon as one has failed, by SIGTERM and with 30 seconds of patience.
Here they are asked first where they stand, then they are ended at once: what a program may do about SIGTERM (save,
and end with 75) is impossible once a rank is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .causes import STOPPED, Failure, first_cause
from .folder import RunFolder
from .logs import RankLogs
from .news import News
from .page import Page, where_it_stood
from .rank import STACKS_SIGNAL

_MOMENT = 0.05
_ANSWERS = 1.0  # seconds in which ranks that live say where they stand
_CAUSE = 4.0  # seconds that a better cause than "lost another rank" is waited for
_STOPPING = 120.0  # seconds between the first and the last rank that ends after it was asked to
_EXIT_BARRIER = 60.0


@dataclass
class Job:
    """A run on this machine, as the agent's thread and the main thread see it.

    Attributes:
        command: the line that starts it again.
        least: ranks of this machine that have to be left.
        stop_asked: by a signal to this process.
        status: exit status that the job is to end with, once it is known.
    """

    id: str
    folder: RunFolder
    command: str
    least: int
    restarts: int
    news: News
    stop_asked: bool = False
    status: int | None = None
    ranks: list[int] = field(default_factory=list)  # global, of this machine
    world_size: int = 0


class Agent(LocalElasticAgent):
    """See above.

    Args:
        spec: what is run, and where machines meet.
        address: of this machine, for the ranks of others.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, job: Job, address: str) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=_EXIT_BARRIER)
        self._logs, self._job, self._address = logs, job, address
        self._server: TCPStore | None = None  # the store in which ranks meet; it outlives them
        self._before: tuple[int, Path | None] | None = None  # the last failure: local rank, checkpoint then
        self._told = False  # the present attempt's failure

    def signal_ranks(self, number: int) -> None:
        """From any thread: each rank that lives gets a signal."""
        for pid in self._living().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # ------------------------------------------------------------ meeting
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Adds what torch's agents don't agree on: the attempt's number, and a store of its own for each attempt."""
        super()._rendezvous(worker_group)
        store, job = worker_group.store, self._job
        assert store is not None  # noqa: S101 - torch's type is wider than what it does
        if worker_group.group_rank == 0:
            self._server = TCPStore(self._address, 0, None, is_master=True, wait_for_workers=False)
            number = max(job.folder.next_attempt(), self._logs.number + bool(job.ranks))
            store.set("shardkit/attempt", f"{number} {self._server.port} {self._address}")
        number, port, address = store.get("shardkit/attempt").decode().split(" ", 2)
        worker_group.master_addr, worker_group.master_port = address, int(port)
        self._logs.number, self._logs.attempt = int(number), job.folder.attempt(int(number))
        job.ranks = [worker.global_rank for worker in worker_group.workers]
        job.world_size = worker_group.workers[0].world_size
        self._told = False
        job.news.attempt(self._logs.attempt, job.ranks, job.world_size)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._told:
            self._job.news.say("machines have joined or left: ranks start again")
            self._end_ranks()
        super()._restart_workers(worker_group)

    # ------------------------------------------------------------ monitoring
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(self._ended().values()) and not self._told:
            self._told = True
            if self._job.stop_asked:
                self._remaining_restarts = 0
            if not self._have_stopped():
                self._tell()
            self._end_ranks()
        return super()._monitor_workers(worker_group)

    def _processes(self) -> dict[int, tuple[int, int | None]]:
        """Process and exit status of each global rank of this machine."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {
            self._job.ranks[local]: (handler.proc.pid, handler.proc.poll())
            for local, handler in list(handlers.items())
        }

    def _living(self) -> dict[int, int]:
        return {rank: pid for rank, (pid, status) in self._processes().items() if status is None}

    def _ended(self) -> dict[int, int]:
        return {rank: status for rank, (_, status) in self._processes().items() if status is not None}

    def _end_ranks(self) -> None:
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, 5)

    def _have_stopped(self) -> bool:
        """Whether ranks end because they were asked to. Waits for those that are about to."""
        stops = {0, STOPPED} | ({-signal.SIGTERM} if self._job.stop_asked else set())
        until = time.monotonic() + _STOPPING
        while set(self._ended().values()) <= stops and self._living() and time.monotonic() < until:
            time.sleep(_MOMENT)
        statuses = set(self._ended().values())
        if self._job.stop_asked and -signal.SIGTERM in statuses and STOPPED not in statuses:
            self._job.status = 128 + signal.SIGTERM
            return True
        if self._living() or not statuses <= stops:
            return False
        self._remaining_restarts = 0
        self._job.status = STOPPED if STOPPED in statuses else 128 + signal.SIGTERM
        self._exit_barrier()
        return True

    # ------------------------------------------------------------ telling
    def _failures(self) -> list[Failure]:
        return [
            Failure(rank, pid, status, self._noticed.setdefault(rank, time.time()), self._logs.files(rank))
            for rank, (pid, status) in self._processes().items()
            if status
        ]

    def _tell(self) -> None:
        """Writes the page about the failure."""
        self._noticed: dict[int, float] = {}
        began, asked = time.monotonic(), self._living()
        self._ask(asked)
        is_signalled = False
        while True:
            waited, failures = time.monotonic() - began, self._failures()
            silent = [r for r in self._living() if not where_it_stood(self._logs.files(r))]
            if waited > _ANSWERS / 2 and silent and not is_signalled:
                is_signalled = True
                self._ask_for_stacks(silent)
            patience = _CAUSE if first_cause(failures).is_consequence else _ANSWERS
            if waited >= patience or (patience == _ANSWERS and not silent):
                break
            time.sleep(_MOMENT)
        self._publish(self._failures())

    def _ask(self, ranks: dict[int, int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.close(os.open(self._logs.pipe(rank), os.O_WRONLY | os.O_NONBLOCK))

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Of ranks in which not even the thread for questions runs. One that has not begun would be ended by it."""
        for rank in ranks:
            if (
                STACKS_SIGNAL
                and self._logs.files(rank).with_suffix(".stacks").exists()
                and rank in self._living()
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._living()[rank], STACKS_SIGNAL)

    def _publish(self, failures: list[Failure]) -> None:
        job, cause = self._job, first_cause(failures)
        checkpoint = job.folder.last_checkpoint()
        others = {f.rank: f"ended: {f.text}" for f in failures if f.rank != cause.rank}
        for rank, status in self._ended().items():
            if status == 0:
                others[rank] = "had ended with status 0"
        for rank in self._living():
            others[rank] = where_it_stood(self._logs.files(rank)) or "did not say where it stood"
        page = Page(
            headline=f"rank {cause.rank} of {job.world_size} failed: {cause.text}",
            run=job.id,
            attempt=self._logs.number,
            cause=cause,
            others=others,
            checkpoint=checkpoint,
            next_step=self._next_step(job.ranks.index(cause.rank), checkpoint),
        )
        job.news.page(page)

    def _next_step(self, local_rank: int, checkpoint: Path | None) -> str:
        """Decides how the job goes on; in words."""
        job, spec = self._job, self._worker_group.spec
        if self._remaining_restarts == 0:
            return f"To resume: {job.command}"
        number = spec.max_restarts - self._remaining_restarts + 1
        again, self._before = self._before == (local_rank, checkpoint), (local_rank, checkpoint)
        why = ""
        if again and spec.local_world_size > job.least:
            spec.local_world_size -= 1
            why, self._before = ", since the same rank failed twice without a new checkpoint", None
        return f"Restart {number} of {spec.max_restarts}, with {spec.local_world_size} ranks on this machine{why}"
