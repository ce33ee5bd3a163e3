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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec

from ...errors import ConfigurationError
from ...launching.run_folder import RUN_DIR, RunFolder
from ...tracing.tracer import VARIABLE as TRACE
from ..doctor.network import can_host, interface_of, own_address
from .agent import Agent, RankLogs, RunOnMachine, RunOptions
from .news import STOPPED, News, last_checkpoint

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
            interface = interface_of(self._address)
            if interface:  # gloo would take the one that the machine's name stands for
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._news = News(name, folder)
        self._job = RunOnMachine(name, options, folder, self._news)
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
            raise _named(self._error, self._job.options.nodes[0], self._job.folder) from self._error
        if self._job.is_cut_off:
            # the agent's thread waits for an answer that may come while the program ends
            self._end(1)
        if self._job.status is None:
            return int(self._failed)
        saved, command = last_checkpoint(self._job.folder), self._job.options.command
        how = "SIGTERM ended ranks whose program doesn't ask stop_requested()"
        if self._job.status == STOPPED:
            how = "ranks have stopped"
        self._news.say(f"{how}. Last complete checkpoint: {saved or 'none'}. To resume: {command}")
        return self._job.status

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
                f"{signal.Signals(number).name}: ranks save and end, within {self._job.options.grace:g} s; once more, "
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


def _handler(
    options: RunOptions, name: str, address: str, is_host: bool, folder: RunFolder
) -> rendezvous.RendezvousHandler:
    """Makes what lets machines meet."""
    for hosts in (is_host, False):
        parameters = rendezvous.RendezvousParameters(
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
            return rendezvous.registry.get_rendezvous_handler(parameters)
        except rendezvous.RendezvousError as error:
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
