"""Runs a program on simulated ranks of this process, and says what it saw."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist

from shardkit import backend as backends
from shardkit.backend import Group, get_backend, is_group
from shardkit.backends.diagnosis.calls import Call
from shardkit.backends.diagnosis.places import SourceLine
from shardkit.backends.simulated.backend import SimulatedBackend, enter_group
from shardkit.backends.simulated.devices_on_host import DevicesOnHost, host_for_devices
from shardkit.backends.simulated.group import Line, SimulatedGroup
from shardkit.backends.simulated.process_group import ProcessGroupOfThreads
from shardkit.backends.simulated.rank_threads import RankThreads
from shardkit.errors import ConfigurationError, RankFailedError
from shardkit.types import Args, ProcessGroup, T

from .program import Program, RankFunction, begin_as_new_process, spawning
from .ranks import Rank, acting_as, current
from .report import Report
from .surroundings import environment_of, libraries, surroundings
from .torch_world import SharedStore, leave, torch_worlds
from .waiting import noticing_stillness, waiting_elsewhere
from .watching import AfterStep, EnoughSteps, Goal, RankMemory, WholeBatches, note_call, watching

_STOOD_FOR = ("gloo", "cuda", "simulated")  # shardkit's backends that the rehearsal's serves


def rehearse(
    target: str | os.PathLike[str] | Callable[[int], object],
    ranks: int,
    *,
    steps: int | None = None,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    show: Sequence[int] = (0,),
    memory: bool = True,
    timeout: float | None = None,
    compare: bool = False,
    cpu: bool | None = None,
    after_step: AfterStep | None = None,
) -> Report:
    """Runs an unchanged script on simulated ranks: threads of this process that take turns.

    ``torch.distributed``, and what libraries do with it, works between them; see docs/REHEARSAL.md.

    Args:
        target: a script; with ``is_module`` the name of a module; or a function of the rank, which finds a default
            process group.
        steps: ends each rank after so many steps of an optimizer; None: at the end of the script.
        arguments: the script's own.
        show: ranks whose output is shown.
        memory: counts the bytes in tensors, which makes small operations slower.
        timeout: seconds; None: no limit.
        cpu: CUDA devices mean the CPU; None: where there is no CUDA.
        after_step: is told the rank and its optimizer after each step.
        compare: runs it once more, on one rank that draws the batches of all of them together, for its losses.

    Returns:
        What was seen. Ranks that would hang, and errors of the script, are in it; nothing is raised for them.

    Raises:
        ConfigurationError: the target can't be run, or a rehearsal runs already.
        BackendError: not with this version of torch.
    """
    if ranks < 1 or (steps is not None and steps < 1):
        raise ConfigurationError(f"ranks and steps are numbers from 1, got {ranks} and {steps}")
    if current() is not None or isinstance(backends._instances.get("gloo"), RehearsalBackend):
        raise ConfigurationError("a rehearsal runs already in this process; one at a time")
    program = RankFunction(target) if callable(target) else Program(os.fspath(target), is_module, arguments)
    on_host = not get_backend("cuda").is_available() if cpu is None else cpu
    report = _Rehearsal(program, ranks, memory, on_host).run(steps, show, timeout, after_step=after_step)
    if not compare or not report.is_good:
        return report
    whole = WholeBatches(report.ranks[0].loaders, ranks)
    return dataclasses.replace(
        report, alone=_Rehearsal(program, 1, False, on_host).run(steps, (), timeout, whole)
    )


class _Rehearsal:
    def __init__(self, program: Program | RankFunction, world_size: int, memory: bool, on_host: bool) -> None:
        self._program, self._memory, self._on_host = program, memory, on_host
        self._backend = RehearsalBackend()
        self._threads = RankThreads(world_size, issued=self._note, patient=True)
        line = Line(range(world_size), "all ranks")
        self._ranks = [
            Rank(number, SimulatedGroup(self._backend, self._threads, line, number), environment_of(number, world_size))
            for number in range(world_size)
        ]  # fmt: skip

    def run(
        self,
        steps: int | None,
        show: Sequence[int],
        timeout: float | None,
        batches: WholeBatches | None = None,
        after_step: AfterStep | None = None,
    ) -> Report:
        goal = None if steps is None else Goal(steps, self._threads)
        failure: RankFailedError | None = None
        results: list[object] = []
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            stack.enter_context(
                mock.patch.dict(backends._instances, dict.fromkeys(_STOOD_FOR, self._backend))
            )
            stack.enter_context(torch_worlds(SharedStore(self._threads)))
            stack.enter_context(surroundings(show))
            stack.enter_context(libraries())
            stack.enter_context(waiting_elsewhere(self._threads))
            if self._on_host:
                stack.enter_context(host_for_devices())
            stack.enter_context(watching(goal, batches, after_step))
            for name in ("spawn", "start_processes"):
                outside = getattr(torch.multiprocessing, name)
                stack.enter_context(mock.patch.object(torch.multiprocessing, name, spawning(outside)))
            stack.enter_context(self._program.beginning())
            stack.enter_context(noticing_stillness(self._threads))
            try:
                results = self._threads.run(self._run_rank, (), timeout)
            except RankFailedError as error:
                failure = error
        seen = [rank.seen for rank in self._ranks]
        return Report(self._program.name, steps, seen, self._threads.hang, failure, results)

    def _run_rank(self, number: int) -> object:
        rank = self._ranks[number]
        with ExitStack() as stack:
            stack.enter_context(acting_as(rank))
            if self._on_host:
                stack.enter_context(DevicesOnHost())
            if self._memory:
                stack.enter_context(RankMemory(rank, self._threads))
            enter_group(rank.everyone)
            begin_as_new_process(number)
            try:
                return self._program.run(rank)
            except EnoughSteps:
                return None
            finally:
                leave(rank)
                rank.main = None

    def _note(self, number: int, call: Call, place: SourceLine, size: int, world_size: int) -> None:
        note_call(self._ranks[number], call, place, size, world_size)


# ------------------------------------------------------------ shardkit's backend
class RehearsalBackend(SimulatedBackend):
    """CPU tensors, one thread a rank, over the process groups that the script has made.

    It has gloo's name: scripts that look at it do what they do there.
    """

    name = "gloo"
    process_group_backend = "gloo"

    def group(self, process_group: ProcessGroup = None) -> Group:
        if is_group(process_group) or current() is None:
            return super().group(process_group)
        if process_group is None and not dist.is_initialized():
            raise ConfigurationError(
                "no process group exists yet: call torch.distributed.init_process_group(...) first; the script would "
                "fail the same way under torchrun"
            )
        chosen = dist.group.WORLD if process_group is None else process_group
        if isinstance(chosen, ProcessGroupOfThreads):
            return chosen.below
        if chosen is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError("this rank is no member of the process group that it passes")
        return super().group(chosen)

    def launch(
        self, fn: Callable[..., T], world_size: int, args: Args = (), *, timeout: float | None = None,
        start_timeout: float | None = None,
    ) -> list[T]:  # fmt: skip
        """Refuses: a rank of a rehearsal is started already, so that launch does not come here."""
        raise ConfigurationError(
            "ranks can't be launched from a thread that is no rank while a rehearsal runs"
        )
