"""torch's elastic agent, with a look at what happened before ranks that are left are ended.

The agent of torch restarts ranks and lets machines meet; its methods are overridden where it monitors, meets and
restarts. It would end all ranks of the machine as soon as one has failed, by SIGTERM and with 30 seconds of patience.
Here they are asked first where they stand, then they are ended at once: what a program may do about SIGTERM (save,
and end with 75) is impossible once a rank is gone.

[Note: several machines] Agents hear of each other each half second, and of what has failed where.

torch's agents notice a machine that is gone only when they meet anew, and ranks only when their process group's timeout
is over. Here each agent's thread counts in a store of its own attempt, and reads how far the others have counted.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from ...checkpoint.format import folders
from ...errors import CONSEQUENCES, ConfigurationError
from ...launching.run_folder import RUN_DIR, RunFolder, steps_of
from ...tracing.tables import counted
from ...tracing.tracer import VARIABLE as TRACE
from ...tracing.tracer import read_plan
from ...types import Kwargs
from ..doctor import can_host, interfaces, is_reachable, own_address
from .rank import FILES, PIPE, STACKS_SIGNAL

# ------------------------------------------------------------ news
# Output of a run on the terminal: rank 0's output, a line about its progress, and the page about a failure.

_EVERY = 0.5  # seconds between progress lines
_CHUNK = 1 << 16
_WIDTH = 100  # of the page about a failure
_OTHERS = 16  # ranks of which it has a line


class News:
    """The agent's thread reports; the main thread shows.

    Args:
        folder: where pages are kept.
    """

    def __init__(self, run: str, folder: RunFolder) -> None:
        self.run, self.folder = run, folder
        self._lock = threading.RLock()
        self._outputs: list[tuple[Path, io.BufferedReader, IO[str]]] = []
        self._attempt: Path | None = None
        self._ranks: list[int] = []
        self._world_size = 0
        self._shown = 0.0
        self._line = ""
        self._rate: list[tuple[float, int]] = []  # times and steps of the last seconds
        self._began = time.monotonic()

    # ------------------------------------------------------------ from the agent's thread
    def attempt(self, folder: Path, ranks: list[int], world_size: int) -> None:
        with self._lock:
            self.show_outputs()
            self._attempt, self._ranks, self._world_size, self._rate = folder, ranks, world_size, []
            self._outputs = []
            if 0 in ranks:
                for ending, stream in ((".out", sys.stdout), (".err", sys.stderr)):
                    path = folder / f"rank0{ending}"
                    path.touch()
                    self._outputs.append((path, path.open("rb"), stream))

    def say(self, text: str) -> None:
        """Writes a line of the run's own."""
        with self._lock:
            self.show_outputs()
            self._clear()
            print(f"shardkit run: {text}", file=sys.stderr, flush=True)

    def page(self, lines: list[str]) -> None:
        """Shows the page about a failure, and keeps it."""
        text = "\n".join(["=" * _WIDTH, *lines, "=" * _WIDTH, ""])
        with self._lock, contextlib.suppress(OSError):
            self.show_outputs()
            self._clear()
            (self.folder.path / "failure.txt").write_text(text)
            sys.stderr.write(text)
            sys.stderr.flush()

    # ------------------------------------------------------------ from the main thread
    def show_outputs(self) -> None:
        """Shows what rank 0 has printed since."""
        with self._lock:
            for path, file, stream in self._outputs:
                while chunk := file.read(_CHUNK):
                    # the traceback that has ended rank 0 is left out: the page says what matters of it
                    end = error_of(path).get("printed") if stream is sys.stderr else None
                    if end is not None:
                        chunk = chunk[: max(0, end - file.tell() + len(chunk))]
                    self._clear()
                    stream.write(chunk.decode(errors="replace"))
                    stream.flush()

    def show(self) -> None:
        with self._lock:
            self.show_outputs()
            if sys.stderr.isatty() and time.monotonic() - self._shown >= _EVERY:
                self._shown = time.monotonic()
                self._clear()
                self._line = self._progress()
                sys.stderr.write(self._line)
                sys.stderr.flush()

    def close(self) -> None:
        with self._lock:
            self.show_outputs()
            self._clear()

    def _progress(self) -> str:
        if self._attempt is None:
            waited = time.monotonic() - self._began
            return f"[{self.run}: waits for other machines, {waited:.0f} s]" if waited > 2 else ""
        steps = [steps_of(self._attempt / f"rank{rank}.steps")[0] for rank in self._ranks]
        least, now = min(steps, default=0), time.monotonic()
        self._rate = [(t, s) for t, s in self._rate if now - t < 10] + [(now, least)]
        seconds = now - self._rate[0][0]
        rate = (least - self._rate[0][1]) / seconds if seconds else 0.0
        saved = last_checkpoint(self.folder)
        last = f", last checkpoint {saved.name}" if saved else ""
        return f"[{self.run}: {counted(self._world_size, 'rank')}, step {least}, {rate:.3g} steps/s{last}]"

    def _clear(self) -> None:
        if self._line:
            sys.stderr.write("\r" + " " * len(self._line) + "\r")
            self._line = ""


# ------------------------------------------------------------ which rank was the cause, and what is said about each
STOPPED = 75  # EX_TEMPFAIL: the program was asked to stop, has saved, and can be started again
_OF_GLOO = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe")
_INSIDE = re.compile(r" \(\[/.*\)$")  # where in gloo's source it was found
_LINES, _LETTERS = 40, 600  # of a traceback, and of a message


def error_of(files: Path) -> Kwargs:
    """Returns the exception that ended a rank, as it wrote it down; empty if it could not."""
    try:
        message = json.loads(files.with_suffix(".error.json").read_text())["message"]
        return {"text": message["message"], **message["extraInfo"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True)
class Failure:
    """A rank that has failed, or has made others fail.

    Attributes:
        rank: global.
        status: exit status; negative: the signal that ended it.
        noticed: when that was seen (seconds since the epoch).
        files: path of its files, without their endings.
        fault: what it did, where it is no error of its own: it hangs, or left too early.
    """

    rank: int
    status: int
    noticed: float
    files: Path
    fault: str = ""

    @property
    def when(self) -> float:
        return float(error_of(self.files).get("time", self.noticed))

    @property
    def error_text(self) -> str:
        """Returns the exception in a line; "" if the rank wrote none down."""
        return _INSIDE.sub("", error_of(self.files).get("text", "").strip().partition("\n")[0])[:_LETTERS]

    @property
    def text(self) -> str:
        """Returns the exception, or how the process ended, in a line."""
        if self.error_text:
            return self.error_text
        if self.status < 0:
            number = -self.status
            known = number in set(signal.Signals)
            name = signal.Signals(number).name if known else f"signal {number}"
            return f"ended by {name}{_KNOWN.get(number, '')}"
        return f"ended with exit status {self.status}"

    @property
    def headline(self) -> str:
        """Says what became of it, after "rank N of M"."""
        return self.fault or f"failed: {self.text}"

    @property
    def steps(self) -> int:
        """Counts the steps of an optimizer that it has made."""
        return steps_of(self.files.with_suffix(".steps"))[0]

    @property
    def trace(self) -> str:
        """Returns the traceback, or the last lines that it printed."""
        trace = error_of(self.files).get("py_callstack", "").rstrip()
        printed = tail(self.files.with_suffix(".err"), 15)
        lines = trace.splitlines() or [line for line in printed if not line.startswith("[W")]
        if len(lines) > _LINES:
            lines = [*lines[:5], f"  ... {len(lines) - _LINES} lines", *lines[5 - _LINES :]]
        return "\n".join(lines)

    @property
    def is_consequence(self) -> bool:
        """Says whether it says no more than that another rank is gone."""
        text = "" if self.fault else error_of(self.files).get("text", "")
        return text.startswith(CONSEQUENCES) or bool(_OF_GLOO.search(text))


_KNOWN = {
    int(signal.SIGKILL): (
        " (from outside: the kernel does so where memory is short, see dmesg; schedulers do so at limits)"
    ),
    int(signal.SIGSEGV): " (a crash in compiled code)",
    int(signal.SIGABRT): " (compiled code gave up; what it printed says why)",
    int(signal.SIGBUS): " (mostly: /dev/shm is full, or a mapped file was cut)",
}


def first_cause(failures: list[Failure], left: list[Failure] | None = None) -> Failure:
    """Returns the earliest one that is no consequence of another's.

    Args:
        left: ranks that ended with status 0. Where those that failed have only lost another rank, it is one of these
            that they have lost, unless most ranks have ended so: then the others do more than all have agreed on.
    """
    cause = min(failures, key=lambda f: (f.is_consequence, f.when))
    if left and cause.is_consequence and len(left) <= len(failures):
        return min(left, key=lambda f: (f.steps, f.when))
    return cause


def tail(path: Path, lines: int) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def last_checkpoint(run: RunFolder) -> Path | None:
    """Returns the complete checkpoint of the most steps that ranks of a run have saved; None if there is none."""
    found = [item for folder in run.checkpoint_dirs() for item in folders.complete(folder).items()]
    return Path(max(found)[1]) if found else None


def where_it_stood(files: Path) -> str:
    """Reads what a rank's thread for questions has written, or what faulthandler has; "" if neither."""
    text = "\n".join(tail(files.with_suffix(".where"), 60)).strip()
    if text:
        return text
    for line in tail(files.with_suffix(".stacks"), 60):
        name = line.strip()
        if name.startswith('File "') and "/torch/" not in name and "/shardkit/" not in name:
            return f"stood at {name}"
    return ""


# ------------------------------------------------------------ the agent

_MOMENT = 0.05
_BRIEF = 1.0  # seconds in which ranks that live say where they stand, and
_ANSWERS = 3.0  # where the machine is busy, or they are about to end
_CAUSE = 4.0  # seconds that a better cause than "lost another rank" is waited for
_NAP = 10.0  # seconds: a longer pause between two looks was this process's own (it was stopped)
_EXIT_BARRIER = 60.0
_PERIOD, _TELLING = 0.5, 1.5  # seconds between beats, and that telling takes at most
LEFT = "left with status 0 in mid-training"
SILENCE = 6.0  # seconds after which a machine is taken to be lost


@dataclass(frozen=True)
class RunOptions:
    """Options of ``shardkit run``; its help says what each option is, with its default.

    Attributes:
        program: ``[-m] PROGRAM ARGUMENTS``.
        command: the line that starts it again.
        least: ranks of a machine that it goes on with (``--min-ranks``); None: all.
    """

    program: Sequence[str]
    command: str
    ranks: int
    nodes: tuple[int, int]
    rendezvous: str
    restarts: int
    least: int | None
    id: str
    runs: Path
    join_timeout: int
    trace: str
    grace: float
    stuck_after: float

    def __post_init__(self) -> None:
        least, most = self.nodes
        if not 1 <= least <= most:
            raise ConfigurationError(f"--nodes {least}:{most}: write MIN:MAX with 1 <= MIN <= MAX")
        if self.ranks < 1:
            raise ConfigurationError(f"--ranks {self.ranks}: a machine has at least one")
        if self.least is not None and not 1 <= self.least <= self.ranks:
            raise ConfigurationError(f"--min-ranks {self.least}: between 1 and --ranks, {self.ranks}")
        if self.restarts < 0:
            raise ConfigurationError(f"--restarts {self.restarts}: at least 0")
        if not (self.grace >= 0 and self.stuck_after >= 0):
            raise ConfigurationError(
                f"--grace {self.grace:g} --stuck-after {self.stuck_after:g}: at least 0 seconds"
            )
        if self.least not in (None, self.ranks) and self.restarts < 2:
            raise ConfigurationError(
                "--min-ranks needs --restarts of at least 2: a rank has to fail twice before others go on without it"
            )
        if most > 1 and not self.rendezvous:
            raise ConfigurationError(
                "--nodes above 1 needs --rdzv HOST:PORT, the same everywhere: a machine of the job, and a free port"
            )
        if most > 1 and not self._id():
            raise ConfigurationError(
                "--nodes above 1 needs --id NAME, the same everywhere and new for every job"
            )
        if self.trace:
            read_plan(self.trace, "--trace")
        name = self.program[0] if self.program else ""
        if name != "-m" and not Path(name).is_file():
            raise ConfigurationError(f"there is no program {name!r}; for a module write -m MODULE")

    def _id(self) -> str:
        return self.id or os.environ.get("SLURM_JOB_ID", "")

    @property
    def name(self) -> str:
        return self._id() or time.strftime("%Y%m%d-%H%M%S-") + f"{os.getpid() % 1000:03}"


class Agent(LocalElasticAgent):
    """Starts ranks, and restarts them; what is no part of torch's is seen by the main thread, too.

    Args:
        spec: what is run, and where machines meet.
        own: address of this machine, for the ranks of others.

    Attributes:
        meets: it waits for other machines.
        stop_asked: when a signal to this process asked ranks to save and end (monotonic); 0: none has.
        status: exit status that the job is to end with, once it is known.
        is_cut_off: from where machines meet.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, options: RunOptions, news: News, own: str) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=_EXIT_BARRIER)
        self._logs, self._options, self._news, self._address = logs, options, news, own
        self.stop_asked = 0.0
        self.status: int | None = None
        self.is_cut_off = False
        self._ranks: list[int] = []  # global, of this machine
        self._world_size = 0
        self._server: TCPStore | None = None  # the store in which ranks meet; it outlives them
        self._before: tuple[int, Path | None] | None = None  # the last failure: local rank, checkpoint then
        self._told = False  # the present attempt's failure
        self._telling = threading.Lock()
        self._noticed: dict[int, float] = {}  # when ranks were seen to have failed
        self._heart = Heart()
        self.meets = True
        self._signs: Signs = []  # of life, when last looked at
        self._looked = self._quiet = 0.0  # when that was, and seconds without new ones

    def overdue(self, since: float) -> str:
        """Says that ranks which were asked to stop then should have ended by now; "" if it is not so."""
        grace = self._options.grace
        if time.monotonic() - since <= grace:
            return ""
        return f"ranks had not ended {grace:g} s after they were asked to save and end (--grace)"

    def signal_ranks(self, number: int, among: Container[int] | None = None) -> None:
        """Sends each rank that lives, or of some, a signal; from any thread."""
        for rank, pid in self._living().items():
            if among is None or rank in among:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        self._heart.stop()

    def look_for_lost(self) -> None:
        """Looks from the main thread, since the agent's own may wait for a machine that can't be reached."""
        lost = "" if self._told else self._heart.lost()
        if not lost:
            return
        with self._telling:
            if self._told:
                return
            self._told = True
            self._ask(self._living())
            self.is_cut_off = not is_reachable(self._options.rendezvous)
            time.sleep(_BRIEF / 2)
            self._publish(None, f"{lost}: it was ended, or its link is down")
            self._end_ranks()

    # ------------------------------------------------------------ meeting
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Adds what torch's agents don't agree on: the attempt's number, and a store of its own for each attempt."""
        self.meets = True
        self._heart.stop()
        self._heart = Heart()
        super()._rendezvous(worker_group)
        store = worker_group.store
        assert store is not None  # noqa: S101 - torch's type is wider than what it does
        if worker_group.group_rank == 0:
            self._server = TCPStore(self._address, 0, None, is_master=True, wait_for_workers=False)
            number = max(self._news.folder.next_attempt(), self._logs.number + bool(self._ranks))
            store.set("shardkit/attempt", f"{number} {self._server.port} {self._address}")
        number, port, address = store.get("shardkit/attempt").decode().split(" ", 2)
        worker_group.master_addr, worker_group.master_port = address, int(port)
        self._logs.number, self._logs.attempt = int(number), self._news.folder.attempt(int(number))
        self._ranks = [worker.global_rank for worker in worker_group.workers]
        self._world_size = worker_group.workers[0].world_size
        self._told, self._noticed, self.meets = False, {}, False
        self._looked, self._quiet = time.monotonic(), 0.0
        name = f"{self._address}, rank{'s' * (len(self._ranks) > 1)} {', '.join(map(str, self._ranks))}"
        machines = worker_group.group_world_size
        self._heart = Heart(worker_group.group_rank, machines, name, (address, int(port)))
        self._news.attempt(self._logs.attempt, self._ranks, self._world_size)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        with self._telling:
            if not self._told:
                self._told = True
                self._ask(self._living())
                time.sleep(_BRIEF)
                elsewhere = self._cause_elsewhere()
                if elsewhere is None:
                    self._news.say("machines have joined or left: ranks start again")
                else:
                    self._publish_elsewhere(elsewhere)
                self._end_ranks()
        super()._restart_workers(worker_group)

    # ------------------------------------------------------------ monitoring
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._telling:
            overdue = "" if self._told else self._overdue()
            if not self._told and (overdue or any(self._ended().values())):
                self._told = True
                self._remaining_restarts *= not self.stop_asked
                problem = overdue or self._stopped()
                if problem is not None:
                    self._tell(problem)
                self._end_ranks()
        left = self._left()
        if not self._told and 0 < len(left) == len(self._processes()):
            self._told = True  # where others have lost one of these, this is why
            self._heart.tell(_told_of(first_cause(left)))
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and not self._heart.are_through():
            result.state = WorkerState.HEALTHY  # it starts again with the others, if they do
        return result

    def _overdue(self) -> str:
        """Says why ranks that live are ended now; "" while they may go on."""
        now, living = time.monotonic(), self._living()
        patience = self._options.stuck_after
        if self.stop_asked:
            return self.overdue(self.stop_asked) if living else ""
        passed = now - self._looked
        if not patience or not living or passed < _BRIEF:
            return ""
        signs = [self._logs.signs(rank) for rank in living]
        self._quiet = self._quiet + min(passed, _NAP) if signs == self._signs else 0.0
        self._signs, self._looked = signs, now
        if self._quiet < patience:
            return ""
        return f"for {patience:g} s no rank made a step or printed anything (--stuck-after)"

    def _processes(self) -> dict[int, tuple[int, int | None]]:
        """Lists process and exit status of each global rank of this machine."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {
            self._ranks[local]: (handler.proc.pid, handler.proc.poll())
            for local, handler in list(handlers.items())
        }

    def _living(self) -> dict[int, int]:
        return {rank: pid for rank, (pid, status) in self._processes().items() if status is None}

    def _ended(self) -> dict[int, int]:
        return {rank: status for rank, (_, status) in self._processes().items() if status is not None}

    def _end_ranks(self) -> None:
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, 5)

    def _stopped(self) -> str | None:
        """Waits for ranks that are to end; returns what is overdue, "" if a rank has failed, None if all obeyed."""
        since = self.stop_asked or time.monotonic()
        while self._end_as_asked() and self._living():
            if overdue := self.overdue(since):
                return overdue
            time.sleep(_MOMENT)
        if not self._end_as_asked():
            return ""
        self._remaining_restarts = 0
        self.status = STOPPED if STOPPED in self._ended().values() else 128 + signal.SIGTERM
        if self.status == STOPPED:
            self._exit_barrier()
        return None

    def _end_as_asked(self) -> bool:
        statuses = set(self._ended().values())
        if self.stop_asked and -signal.SIGTERM in statuses and STOPPED not in statuses:
            return True  # what the others say is about those that it ended
        return statuses <= {0, STOPPED}

    # ------------------------------------------------------------ telling
    def _failures(self) -> list[Failure]:
        return [self._failure(rank, status) for rank, status in self._ended().items() if status]

    def _left(self) -> list[Failure]:
        """Lists ranks that ended with status 0."""
        return [self._failure(rank, 0, LEFT) for rank, status in self._ended().items() if status == 0]

    def _hanging(self) -> list[Failure]:
        """Lists ranks that live and don't wait for another one."""
        found, fault = [], "did not end" if self.stop_asked else "hangs"
        for rank in self._living():
            where = where_it_stood(self._logs.files(rank)) or "did not say where it stood"
            if not where.startswith("waited in"):
                found.append(self._failure(rank, 0, f"{fault}: {where}"))
        return found

    def _failure(self, rank: int, status: int, fault: str = "") -> Failure:
        noticed = self._noticed.setdefault(rank, time.time())
        return Failure(rank, status, noticed, self._logs.files(rank), fault)

    def _tell(self, overdue: str = "") -> None:
        """Writes the page about the failure, or about what the ranks that live have not done in time."""
        self._await_answers(overdue)
        elsewhere = self._cause_elsewhere()
        if overdue:
            blamed = self._hanging() or self._left()
            cause = blamed[0] if len(blamed) == 1 else None
        else:
            cause = first_cause(self._failures(), self._left())
        # where no cause is known, it may be another machine's rank that hangs
        notice = FailureNotice(-1, overdue, "", True, time.time()) if cause is None else _told_of(cause)
        self._heart.tell(notice)
        if elsewhere is not None and notice.is_consequence:
            self._publish_elsewhere(elsewhere)
        elif not overdue and notice.is_consequence and self._heart.lost():
            self._publish(None, self._heart.lost())
        else:
            self._publish(cause, overdue, overdue if cause is not None else "")

    def _await_answers(self, overdue: str) -> None:
        """Asks ranks where they stand; returns when the cause is known and they have said it, or after a while."""
        began = time.monotonic()
        self._ask(self._living())
        is_signalled = False
        while True:
            waited, failures = time.monotonic() - began, self._failures()
            files = {r: self._logs.files(r) for r in self._living()}
            silent = [r for r, f in files.items() if not where_it_stood(f)]
            silent = [r for r in silent if not files[r].with_suffix(".error.json").exists()]
            if waited > _BRIEF and silent and not is_signalled:
                is_signalled = True
                # not even their threads for questions run; a rank that has not begun would be ended by it
                begun = [r for r in silent if files[r].with_suffix(".stacks").exists()]
                self.signal_ranks(STACKS_SIGNAL, begun)
            alone = self._heart.is_alone
            is_here = alone or bool(self._hanging()) if overdue else not first_cause(failures).is_consequence
            is_known = is_here or self._cause_elsewhere() is not None
            patience = _ANSWERS if is_known else _CAUSE if alone else SILENCE + _CAUSE / 2
            if waited >= patience or (is_known and not silent) or self._heart.lost():
                return
            time.sleep(_MOMENT)

    def _cause_elsewhere(self) -> FailureNotice | None:
        """Returns a failure on another machine that is no consequence of a third one's."""
        told = self._heart.told()
        return told[0] if told and not told[0].is_consequence else None

    def _ask(self, ranks: dict[int, int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.close(os.open(self._logs.pipe(rank), os.O_WRONLY | os.O_NONBLOCK))

    def _publish_elsewhere(self, cause: FailureNotice) -> None:
        note = f"On another machine:\n{cause.trace}" * bool(cause.trace)
        self._publish(None, f"rank {cause.rank} of {self._world_size} {cause.text}", note)

    def _publish(self, cause: Failure | None, headline: str, note: str = "") -> None:
        """Writes the page, under this headline if what happened did not begin with a rank of this machine."""
        failures = self._failures()
        checkpoint = last_checkpoint(self._news.folder)
        others = {f.rank: f"ended: {f.text}" for f in failures}
        others |= {f.rank: "had ended with status 0" for f in self._left()}
        for rank in self._living():
            raised = Failure(rank, 0, 0.0, self._logs.files(rank)).error_text
            told = f"raised {raised}" if raised else where_it_stood(self._logs.files(rank))
            others[rank] = told or "did not say where it stood"
        if cause is not None:
            others.pop(cause.rank, None)
            headline = f"rank {cause.rank} of {self._world_size} {cause.headline}"
        next_step = self._next_step(-1 if cause is None else self._ranks.index(cause.rank), checkpoint)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        where = f"run {self._news.run}, attempt {self._logs.number}, {now}"
        if cause is not None:
            steps = cause.steps
            where += f", after optimizer step {steps} of this attempt" if steps else ", before the first step"
        lines = [headline, where]
        for shown in ("" if cause is None else cause.trace, note):
            lines += ["", shown] if shown else []
        if others:
            lines += ["", "The others:"]
            lines += [f"  rank {rank} {text}" for rank, text in sorted(others.items())[:_OTHERS]]
            if len(others) > _OTHERS:
                lines.append(f"  ... and {len(others) - _OTHERS} more")
        lines += ["", f"Last complete checkpoint: {checkpoint or 'none'}", next_step]
        if cause is not None:
            lines.append(f"Its output: {cause.files}.out, {cause.files}.err")
        self._news.page(lines)

    def _next_step(self, local_rank: int, checkpoint: Path | None) -> str:
        """Decides how the job goes on; in words."""
        options, spec = self._options, self._worker_group.spec
        if self.is_cut_off:
            why = f"it does not reach {options.rendezvous}"
            return f"This machine leaves the job, since {why}. To come back: {options.command}"
        if self._remaining_restarts == 0:
            return f"To resume: {options.command}"
        number = spec.max_restarts - self._remaining_restarts + 1
        if local_rank < 0 and not self._heart.is_alone:
            return f"Restart {number} of {spec.max_restarts}, with the machines that are left"
        again, self._before = self._before == (local_rank, checkpoint), (local_rank, checkpoint)
        why = ""
        if again and local_rank >= 0 and spec.local_world_size > (options.least or options.ranks):
            spec.local_world_size -= 1
            why, self._before = ", since the same rank failed twice without a new checkpoint", None
        ranks = counted(spec.local_world_size, "rank")
        return f"Restart {number} of {spec.max_restarts}, with {ranks} on this machine{why}"


def _told_of(cause: Failure) -> FailureNotice:
    return FailureNotice(cause.rank, cause.headline, cause.trace, cause.is_consequence, cause.when)


# ------------------------------------------------------------ output of ranks
Signs = list[tuple[object, ...]]


class RankLogs(LogsSpecs):
    """Files of each rank.

    Attributes:
        attempt: its folder, and its number; the agent sets them before it starts ranks.
        pipes: folder of the pipes through which ranks are asked where they stand.
    """

    def __init__(self, run: Path, pipes: Path) -> None:
        super().__init__(str(run))
        self._run, self.pipes = run, pipes
        self.attempt, self.number = run, 0

    @property
    def root_log_dir(self) -> str:
        return str(self._run)

    def files(self, rank: int | str) -> Path:
        """Returns the path of a rank's files, without their endings."""
        return self.attempt / f"rank{rank}"

    def pipe(self, rank: int | str) -> Path:
        return self.pipes / f"{self.number}-{rank}"

    def signs(self, rank: int) -> tuple[object, ...]:
        """Returns what a rank that lives changes: steps of an optimizer, and what it has printed."""
        files = [Path(f"{self.files(rank)}.{ending}") for ending in ("steps", "out", "err")]
        return steps_of(files[0]), *(file.stat().st_size if file.exists() else -1 for file in files)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Returns the files, and adds what ranks find in their environment; the agent calls it."""
        to = LogsDest()
        for local_rank, variables in envs.items():
            files, pipe = self.files(variables["RANK"]), self.pipe(variables["RANK"])
            os.mkfifo(pipe)
            to.stdouts[local_rank], to.stderrs[local_rank] = f"{files}.out", f"{files}.err"
            to.error_files[local_rank] = f"{files}.error.json"
            variables["TORCHELASTIC_ERROR_FILE"] = to.error_files[local_rank]
            # Each agent counts for itself, and not every new round: ranks have to find the same number.
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self.number)
            variables[FILES], variables[PIPE] = str(files), str(pipe)
        return to


# ------------------------------------------------------------ other machines
class FailureNotice(NamedTuple):
    """A failure on some machine.

    Attributes:
        is_consequence: it says no more than that another rank is gone.
        when: it happened, by that machine's clock.
    """

    rank: int
    text: str
    trace: str
    is_consequence: bool
    when: float


class Heart:
    """The thread of one attempt; none where one machine is alone.

    Args:
        number: of this machine; 0 holds the attempt's store.
        name: address and ranks of this machine, as people read them; published by each.
        store: address and port of the attempt's.
    """

    def __init__(
        self, number: int = 0, machines: int = 1, name: str = "", store: tuple[str, int] = ("", 0)
    ) -> None:
        self._number, self._name, self._store = number, name, store
        self.is_alone = machines == 1
        self._heard = {other: time.monotonic() for other in range(machines) if other != number}
        self._counts = dict.fromkeys(self._heard, -1)
        self._names: dict[int, str] = {}
        self._round = time.monotonic()  # the last complete one
        self._to_tell: FailureNotice | None = None
        self._told: dict[int, FailureNotice] = {}
        self._stop, self._wake, self._was_told = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-heart", daemon=True)
        if not self.is_alone:
            self._thread.start()

    def lost(self) -> str:
        """Says which machines are silent, in a sentence; "" for none."""
        now = time.monotonic()
        if now - self._round > SILENCE:
            if self._number == 0:
                return ""  # the store is in this process: it is this machine that is slow
            return f"machine 0 ({self._store[0]}), where machines meet, has not answered for {now - self._round:.0f} s"
        silent = []
        for other, when in self._heard.items():
            if now - when > SILENCE and other not in self._told:
                name = self._names.get(other, "which never answered")
                silent.append(f"machine {other} ({name}) has not been heard of for {now - when:.0f} s")
        return "; ".join(silent)

    def are_through(self) -> bool:
        """Says whether all ranks of all other machines have ended with status 0, or nothing is heard of them."""
        now = time.monotonic()
        return all(
            now - when > SILENCE or (other in self._told and self._told[other].text == LEFT)
            for other, when in self._heard.items()
        )

    def tell(self, failure: FailureNotice) -> None:
        """Tells the others, at once; returns when they can know it, or after a moment."""
        if self.is_alone:
            return
        self._to_tell = failure
        self._was_told.clear()
        self._wake.set()
        self._was_told.wait(_TELLING)

    def told(self) -> list[FailureNotice]:
        """Lists what other machines have told, the first one first."""
        return sorted(self._told.values(), key=lambda t: (t.is_consequence, t.when))

    def stop(self) -> None:
        """Ends with the attempt. A thread that came back from the store while the program ends would abort it."""
        self._stop.set()
        self._wake.set()
        if not self.is_alone:
            self._thread.join(_TELLING)

    def _run(self) -> None:
        count, store, limit = 0, None, datetime.timedelta(seconds=SILENCE)
        while not self._stop.is_set():
            with contextlib.suppress(RuntimeError, ValueError):
                if store is None:  # here, for it may hang
                    store = TCPStore(
                        *self._store, None, is_master=False, wait_for_workers=False, timeout=limit
                    )
                count += 1
                to_tell = self._to_tell
                store.set(f"beat/{self._number}", json.dumps([count, self._name, to_tell]))
                if to_tell is not None:
                    self._was_told.set()
                for other in self._heard:
                    if not store.check([f"beat/{other}"]):
                        continue
                    beats, self._names[other], told = json.loads(store.get(f"beat/{other}"))
                    if beats != self._counts[other]:
                        self._counts[other], self._heard[other] = beats, time.monotonic()
                    if told is not None:
                        self._told[other] = FailureNotice(*told)
                self._round = time.monotonic()
            self._wake.wait(_PERIOD)
            self._wake.clear()


# ------------------------------------------------------------ a run from its beginning to its end
_TICK = 0.1
_LAST_CALL = 10  # seconds that further machines are waited for, once there are enough
_LOCAL = "127.0.0.1"


def run(options: RunOptions) -> int:
    """Returns the exit status: 0; 1 after a failure; 75 if the program has saved and ended because it was asked to."""
    name = options.name
    folder = RunFolder((options.runs / name).absolute())
    (folder.path / "command").write_text(options.command + "\n")
    os.environ[RUN_DIR] = str(folder.path)
    if options.trace:
        os.environ[TRACE] = f"{options.trace},dir={folder.path}"
    # what torch's agent says goes to a file: the terminal gets what people need
    logger, handler = logging.getLogger("torch.distributed.elastic"), logging.FileHandler(folder.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    with tempfile.TemporaryDirectory(prefix="shardkit-run-") as pipes:
        status = _Running(options, name, folder, Path(pipes)).to_the_end()
    if options.trace and (any(folder.path.glob("trace.json")) or any(folder.path.glob("trace.rank-*.json"))):
        print(f"shardkit run: what ranks waited for: shardkit trace {folder.path}", file=sys.stderr)
    return status


class _Running:
    """The agent has a thread of its own; signals come to the main thread, and it shows what happens."""

    def __init__(self, options: RunOptions, name: str, folder: RunFolder, pipes: Path) -> None:
        self._address = own_address(options.rendezvous) if options.rendezvous else _LOCAL
        is_host = True
        if options.rendezvous:
            is_host = can_host(options.rendezvous)
            known = interfaces().items()
            interface = next((name for name, facts in known if facts["address"] == self._address), "")
            if interface:  # gloo would take the one that the machine's name stands for
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._news = News(name, folder)
        self._options = options
        self._spec = WorkerSpec(
            role="rank",
            local_world_size=options.ranks,
            entrypoint=sys.executable,
            args=("-u", "-m", "shardkit.tools.run.rank", *options.program),
            rdzv_handler=self._handler(is_host),
            max_restarts=options.restarts,
            monitor_interval=_TICK,
            local_addr=self._address,
        )
        logs = RankLogs(folder.path, pipes)
        self._agent = Agent(self._spec, logs, options, self._news, self._address)
        self._failed = True
        self._error: BaseException | None = None

    def _handler(self, is_host: bool) -> rendezvous.RendezvousHandler:
        options = self._options
        parameters = rendezvous.RendezvousParameters(
            backend="c10d",
            endpoint=options.rendezvous or "localhost:0",
            run_id=self._news.run,
            min_nodes=options.nodes[0],
            max_nodes=options.nodes[1],
            local_addr=self._address,
            is_host=is_host,
            join_timeout=options.join_timeout,
            last_call_timeout=_LAST_CALL,
            keep_alive_interval=2,
        )
        try:
            return rendezvous.registry.get_rendezvous_handler(parameters)
        except rendezvous.RendezvousError as error:
            if is_host:  # another agent on this machine may have been quicker
                return self._handler(is_host=False)
            raise self._named(error) from error

    def _named(self, error: BaseException) -> BaseException:
        kind = type(error).__name__
        if not kind.startswith("Rendezvous") and not isinstance(error, TimeoutError):
            return error
        return ConfigurationError(
            f"machines did not meet ({kind}: {str(error).partition(chr(10))[0]}). --rdzv has to be the same "
            f"everywhere, at a machine of the job that all others reach, and {self._options.nodes[0]} of them "
            f"(--nodes) have to start within --join-timeout; {self._news.folder.log} has what torch's agent said"
        )

    def to_the_end(self) -> int:
        before = {s: signal.signal(s, self._signalled) for s in (signal.SIGTERM, signal.SIGINT)}
        thread = threading.Thread(target=self._work, name="shardkit-agent", daemon=True)
        thread.start()
        agent = self._agent
        try:
            while thread.is_alive() and not agent.is_cut_off:
                thread.join(_TICK)
                agent.look_for_lost()
                self._news.show()
                if agent.meets and agent.stop_asked and agent.overdue(agent.stop_asked):
                    self._end(128 + signal.SIGTERM)
        finally:
            agent.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._news.close()
        if self._error is not None:
            raise self._named(self._error) from self._error
        if agent.is_cut_off:
            # the agent's thread waits for an answer that may come while the program ends
            self._end(1)
        if agent.status is None:
            return int(self._failed)
        saved, command = last_checkpoint(self._news.folder), self._options.command
        how = "SIGTERM ended ranks whose program doesn't ask stop_requested()"
        if agent.status == STOPPED:
            how = "ranks have stopped"
        self._news.say(f"{how}. Last complete checkpoint: {saved or 'none'}. To resume: {command}")
        return agent.status

    def _work(self) -> None:
        try:
            self._failed = self._agent.run().is_failed()
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._error = error
        finally:
            with contextlib.suppress(Exception):
                self._spec.rdzv_handler.shutdown()

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if not self._agent.stop_asked:
            self._agent.stop_asked = time.monotonic()
            self._news.say(
                f"{signal.Signals(number).name}: ranks save and end, within {self._options.grace:g} s; once more, "
                "and they end at once"
            )
            self._agent.signal_ranks(signal.SIGTERM)
            return
        self._agent.signal_ranks(signal.SIGKILL)
        self._end(128 + number)

    def _end(self, status: int) -> NoReturn:
        """Ends this process, whatever the agent's thread waits for."""
        self._news.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
