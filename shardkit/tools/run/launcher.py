"""Runs a program on ranks: ``shardkit run``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    registry,
)

from ...errors import ConfigurationError
from ...launching.run_folder import RUN_DIR, RunFolder
from ...tracing.tracer import VARIABLE as TRACE
from ...tracing.tracer import read_plan
from ..doctor.network import can_host, interface_of, own_address
from .agent import Agent, RankLogs, RunOnMachine
from .news import News

_TICK = 0.1
_LAST_CALL = 10  # seconds that further machines are waited for, once there are enough
_LOCAL = "127.0.0.1"


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


def run(options: RunOptions) -> int:
    """Returns the exit status: 0; 1 after a failure; 75 if the program has saved and ended because it was asked to."""
    name = options.name
    folder = RunFolder((options.runs / name).absolute())
    (folder.path / "command").write_text(options.command + "\n")
    os.environ[RUN_DIR] = str(folder.path)
    if options.trace:
        os.environ[TRACE] = f"{options.trace},dir={folder.path}"
    _log_to(folder.log)
    with tempfile.TemporaryDirectory(prefix="shardkit-run-") as pipes:
        status = _Running(options, name, folder, Path(pipes)).to_the_end()
    if options.trace and (any(folder.path.glob("trace.json")) or any(folder.path.glob("trace.rank-*.json"))):
        print(f"shardkit run: what ranks waited for: shardkit trace {folder.path}", file=sys.stderr)
    return status


def _log_to(path: Path) -> None:
    """Sends what torch's agent says to its file: the terminal gets what people need."""
    logger, handler = logging.getLogger("torch.distributed.elastic"), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


class _Running:
    """The agent has a thread of its own; signals come to the main thread, and it shows what happens."""

    def __init__(self, options: RunOptions, name: str, folder: RunFolder, pipes: Path) -> None:
        self._address = own_address(options.rendezvous) if options.rendezvous else _LOCAL
        is_host = True
        if options.rendezvous:
            is_host = can_host(options.rendezvous)
            interface = interface_of(self._address)
            if interface:  # gloo would take the one that the machine's name stands for
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._news = News(name, folder)
        least = options.ranks if options.least is None else options.least
        self._job = RunOnMachine(
            name, folder, options.command, least, options.nodes, options.rendezvous, self._news,
            options.grace, options.stuck_after,
        )  # fmt: skip
        handler = _handler(options, name, self._address, is_host, folder)
        self._spec = WorkerSpec(
            role="rank",
            local_world_size=options.ranks,
            entrypoint=sys.executable,
            args=("-u", "-m", "shardkit.tools.run.rank", *options.program),
            rdzv_handler=handler,
            max_restarts=options.restarts,
            monitor_interval=_TICK,
            local_addr=self._address,
        )
        self._agent = Agent(self._spec, RankLogs(folder.path, pipes), self._job, self._address)
        self._failed = True
        self._error: BaseException | None = None

    def to_the_end(self) -> int:
        before = {s: signal.signal(s, self._signalled) for s in (signal.SIGTERM, signal.SIGINT)}
        thread = threading.Thread(target=self._work, name="shardkit-agent", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not self._job.is_cut_off:
                thread.join(_TICK)
                self._agent.look_for_lost()
                self._news.show()
                if self._agent.meets and self._job.stop_asked and self._job.overdue(self._job.stop_asked):
                    self._end(128 + signal.SIGTERM)
        finally:
            self._agent.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._news.close()
        if self._error is not None:
            raise _named(self._error, self._job.nodes[0], self._job.folder) from self._error
        if (
            self._job.is_cut_off
        ):  # the agent's thread waits for an answer that may come while the program ends
            self._end(1)
        if self._job.status is not None:
            self._say_stopped(self._job.status)
            return self._job.status
        return int(self._failed)

    def _work(self) -> None:
        """Runs the agent's thread."""
        try:
            self._failed = self._agent.run().is_failed()
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._error = error
        finally:
            with contextlib.suppress(Exception):
                self._spec.rdzv_handler.shutdown()

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if not self._job.stop_asked:
            self._job.stop_asked = time.monotonic()
            self._news.say(
                f"{signal.Signals(number).name}: ranks save and end, within {self._job.grace:g} s; once more, and they "
                "end at once"
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

    def _say_stopped(self, status: int) -> None:
        saved = self._job.folder.last_checkpoint()
        how = (
            "ranks have stopped"
            if status == 75
            else "SIGTERM ended ranks whose program doesn't ask stop_requested()"
        )
        self._news.say(f"{how}. Last complete checkpoint: {saved or 'none'}. To resume: {self._job.command}")


def _handler(
    options: RunOptions, name: str, address: str, is_host: bool, folder: RunFolder
) -> RendezvousHandler:
    """Makes where machines meet."""
    for hosts in (is_host, False):
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=options.rendezvous or "localhost:0",
            run_id=name,
            min_nodes=options.nodes[0],
            max_nodes=options.nodes[1],
            local_addr=address,
            is_host=hosts,
            join_timeout=options.join_timeout,
            last_call_timeout=_LAST_CALL,
            keep_alive_interval=2,
        )
        try:
            return registry.get_rendezvous_handler(parameters)
        except RendezvousError as error:
            if not hosts:  # else another agent on this machine may have been quicker
                raise _named(error, options.nodes[0], folder) from error
    raise ConfigurationError("unreachable")


def _named(error: BaseException, least: int, folder: RunFolder) -> BaseException:
    """Puts what torch's agent raised into words."""
    kind = type(error).__name__
    if not kind.startswith("Rendezvous") and not isinstance(error, TimeoutError):
        return error
    return ConfigurationError(
        f"machines did not meet ({kind}: {str(error).partition(chr(10))[0]}). --rdzv has to be the same everywhere, at "
        f"a machine of the job that all others reach, and {least} of them (--nodes) have to start within "
        f"--join-timeout; {folder.log} has what torch's agent said"
    )
