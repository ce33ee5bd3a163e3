"""Rehearsals: an unchanged training script on simulated ranks of one process.

Says who would hang and where, before a cluster is asked for: see docs/REHEARSAL.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardkit import backend as backends
from shardkit.backend import Group, Pool, get_backend, is_group
from shardkit.backends.simulated import (
    Hang,
    Line,
    RankThreads,
    SimulatedBackend,
    SimulatedGroup,
    enter_group,
    named,
    ranks_by,
    said_of,
)
from shardkit.backends.simulated.process_group import DevicesOnHost, ProcessGroupOfThreads, host_for_devices
from shardkit.errors import ConfigurationError, RankFailedError
from shardkit.launching.started import variables_of_rank
from shardkit.optimizers.shards import changed_by_steps, listing_of
from shardkit.tools.verify import EXACT, Moment, Tensors, Trace, first_parting
from shardkit.torch_seams.tensors import as_plain, local_of
from shardkit.tracing.tables import counted, in_bytes
from shardkit.types import Args, ProcessGroup, Tree

from . import surroundings
from .surroundings import (
    AfterStep,
    EnoughSteps,
    Goal,
    Rank,
    RankMemory,
    RankRecord,
    Sent,
    SharedStore,
    WholeBatches,
    acting_as,
    current,
    note_call,
    torch_worlds,
    watching,
)

__all__ = ["Report", "rehearse"]


_Number = TypeVar("_Number", int, float)
_LARGEST = 12  # kinds of collectives that are listed


@dataclass(frozen=True)
class Report:
    """The report of a rehearsal; prints as text.

    Attributes:
        steps: after how many steps ranks were to end.
        ranks: what each did.
        hang: where ranks could not go on; None: they all came to their end.
        failure: the first error of a rank; where ranks would hang, an OutOfStepError.
        results: what the function returned, by rank; empty if a rank failed.
        alone: the same program on one rank, if that was asked for.
    """

    name: str
    steps: int | None
    ranks: Sequence[RankRecord]
    hang: Hang | None
    failure: RankFailedError | None
    results: Sequence[object]
    alone: Report | None = None

    @property
    def is_good(self) -> bool:
        """Says whether all ranks came to their end, and none would wait for ever."""
        return self.hang is None and self.failure is None

    def uneven_batches(self) -> list[str]:
        """Lists passes over data that are longer on some ranks than on others, one sentence for each."""
        found = []
        for passes in zip(*(seen.loaders for seen in self.ranks), strict=False):
            lengths = {rank: loader.batches for rank, loader in enumerate(passes)}
            if len(set(lengths.values())) > 1:
                parts = [f"{count} on {named(ranks)}" for count, ranks in ranks_by(lengths).items()]
                found.append(f"batches of the DataLoader at {passes[0].place}: {', '.join(parts)}")
        return found

    def losses(self) -> list[float]:
        """Lists for each step the mean over ranks, and over backwards of a rank, of what ``backward`` was called on."""
        means = []
        for per_rank in zip(*(seen.losses for seen in self.ranks), strict=False):
            values = [value for losses in per_rank for value in losses]
            if values:
                means.append(sum(values) / len(values))
        return means

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def as_data(self) -> dict[str, object]:
        """Returns numbers, lists and text, for programs."""
        return {
            "program": self.name,
            "ranks": len(self.ranks),
            "good": self.is_good,
            "hang": None if self.hang is None else self.hang.what,
            "stands": {} if self.hang is None else {str(r): text for r, text in self.hang.stands.items()},
            "error": None if self.failure is None else self.failure.remote_traceback,
            "uneven_batches": self.uneven_batches(),
            "steps": [seen.steps for seen in self.ranks],
            "losses": self.losses(),
            "losses_of_one_process": None if self.alone is None else self.alone.losses(),
            "peak_bytes": [seen.peak for seen in self.ranks],
            "sent_bytes": [sum(seen.sent.values()) for seen in self.ranks],
            "seconds": [seen.seconds for seen in self.ranks],
            "waited_seconds": [seen.waited for seen in self.ranks],
            "collectives": [
                {"operation": kind.operation, "place": str(kind.place), "calls": calls, "sent_bytes": sent}
                for kind, calls, sent in self._by_kind()
            ],
        }

    def _lines(self) -> Iterator[str]:
        yield f"{self.name} on {counted(len(self.ranks), 'simulated rank')}: " + (
            "every rank came to its end" if self.is_good else "RANKS CAN'T GO ON"
        )
        if self.hang is not None:
            yield f"\n{self.hang.what}"
            yield "\nWhere each rank stood:"
            for text, ranks in ranks_by(self.hang.stands).items():
                yield f"  {said_of(ranks, text)}"
        if self.failure is not None and self.failure.remote_type not in ("OutOfStepError", "RankLostError"):
            yield f"\nThe first error, on rank {self.failure.rank}:\n{self.failure.remote_traceback.rstrip()}"
        uneven = self.uneven_batches()
        if uneven:
            yield "\nUneven batches: with a step for each batch, ranks with more of them wait for ever."
            yield from (f"  {text}" for text in uneven)
        yield "\n" + " " * 27 + "least      most of all ranks"
        yield _row("steps", [seen.steps for seen in self.ranks], str)
        if any(seen.peak for seen in self.ranks):
            yield _row("bytes in tensors, peak", [seen.peak for seen in self.ranks], in_bytes)
        yield _row("bytes sent", [sum(seen.sent.values()) for seen in self.ranks], in_bytes)
        yield _row("seconds", [seen.seconds for seen in self.ranks], "{:.2f}".format)
        yield _row("  of these waited", [seen.waited for seen in self.ranks], "{:.2f}".format)
        losses = self.losses()
        if losses:
            yield f"loss by step, mean of all ranks: {_some(losses)}"
        yield from self._beside_one_process(losses)
        kinds = self._by_kind()
        if kinds:
            yield "\nCollectives of rank 0, and the bytes that a rank sends for them:"
            for kind, calls, sent in kinds[:_LARGEST]:
                yield f"  {calls:6} x {kind.operation:26} {in_bytes(sent):>10}  {kind.place}"
            if len(kinds) > _LARGEST:
                yield f"  and {len(kinds) - _LARGEST} kinds more"

    def _beside_one_process(self, losses: Sequence[float]) -> Iterator[str]:
        if self.alone is None:
            return
        if self.alone.failure is not None:
            last = self.alone.failure.remote_traceback.rstrip().rpartition("\n")[2]
            yield f"one process could not run it: {last}"
            return
        theirs = self.alone.losses()
        yield f"loss by step, in one process:    {_some(theirs)}"
        pairs = list(zip(losses, theirs, strict=False))
        if pairs:
            apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
            yield f"they differ by at most {max(apart):.1e} (step {apart.index(max(apart)) + 1} of {len(pairs)})"

    def _by_kind(self) -> list[tuple[Sent, int, int]]:
        """Lists those of rank 0; those that send most first."""
        first = self.ranks[0]
        kinds = sorted(first.calls, key=lambda kind: -first.sent[kind])
        return [(kind, first.calls[kind], first.sent[kind]) for kind in kinds]


def _row(what: str, values: Sequence[_Number], as_text: Callable[[_Number], str]) -> str:
    least, most = min(values), max(values)
    ranks = [rank for rank, value in enumerate(values) if value == most]
    who = "" if least == most else f"   most on {named(ranks)}"
    return f"{what:22} {as_text(least):>9} {as_text(most):>9}{who}"


def _some(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses[:8]) + (", ..." if len(losses) > 8 else "")


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
        self._threads = RankThreads(
            world_size, issued=lambda number, *call: note_call(self._ranks[number], *call), patient=True
        )
        line = Line(range(world_size), "all ranks")
        self._ranks = []
        for number in range(world_size):
            everyone = SimulatedGroup(self._backend, self._threads, line, number)
            environment = {
                **os.environ,
                **variables_of_rank(number, world_size, 29500),
                "MASTER_ADDR": "localhost",
                "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_RUN_ID": "rehearsal",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
            }
            self._ranks.append(Rank(number, everyone, environment))

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
            stack.enter_context(surroundings.surroundings(show))
            stack.enter_context(surroundings.libraries())
            stack.enter_context(surroundings.waiting_elsewhere(self._threads))
            if self._on_host:
                stack.enter_context(host_for_devices())
            stack.enter_context(watching(goal, batches, after_step))
            for name in ("spawn", "start_processes"):
                outside = getattr(torch.multiprocessing, name)
                stack.enter_context(mock.patch.object(torch.multiprocessing, name, spawning(outside)))
            stack.enter_context(self._program.beginning())
            stack.enter_context(surroundings.noticing_stillness(self._threads))
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
                rank.memory = stack.enter_context(RankMemory(rank, self._threads))
            enter_group(rank.everyone)
            torch.default_generator.manual_seed(_FRESH_SEED)  # as in a new process: the same on all ranks
            random.seed(f"rank {number}")
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(number)
            try:
                return self._program.run(rank)
            except EnoughSteps:
                return None
            finally:
                clock = self._threads.clock
                rank.seen.seconds, rank.seen.waited = clock.now(number), clock.waited[number]
                if rank.world.get("default_pg") is not None:
                    dist.destroy_process_group()
                rank.main = rank.memory = None


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

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        """Refuses: a rank of a rehearsal is started already, so that launch does not come here."""
        raise ConfigurationError(
            "ranks can't be launched from a thread that is no rank while a rehearsal runs"
        )


# ------------------------------------------------------------ programs
_FRESH_SEED = 67280421310721  # what torch's generator has in a new process


class Program:
    """A script of a file, or a module with ``is_module``."""

    def __init__(self, name: str, is_module: bool, arguments: Sequence[str]) -> None:
        self.name, self._arguments = name, list(arguments)
        self._spec: Tree = None
        self._first = os.getcwd()
        if is_module:
            self._file, self._code = self._find_module(name)
            return
        path = Path(name)
        if not path.is_file():
            raise ConfigurationError(f"{name}: no such script; with -m, a module's name")
        self._file, self._first = str(path), str(path.resolve().parent)
        try:
            self._code = compile(path.read_bytes(), self._file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ConfigurationError(f"{name} is no Python: {error}") from error

    def _find_module(self, name: str) -> tuple[str, CodeType]:
        with mock.patch.object(sys, "path", [self._first, *sys.path]):
            try:
                self._spec = importlib.util.find_spec(name)
                if self._spec is not None and self._spec.submodule_search_locations is not None:
                    self._spec = importlib.util.find_spec(f"{name}.__main__")
                code = None if self._spec is None else self._spec.loader.get_code(self._spec.name)
            except ImportError as error:
                raise ConfigurationError(f"module {name} can't be found: {error}") from error
        if code is None:
            raise ConfigurationError(f"module {name} can't be found, or has no Python source")
        return str(self._spec.origin), code

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        with mock.patch.object(sys, "argv", [self._file, *self._arguments]):
            with mock.patch.object(sys, "path", [self._first, *sys.path]):
                yield

    def run(self, rank: Rank) -> None:
        """Runs in the rank's thread."""
        package = None if self._spec is None else self._spec.parent
        module = rank.main = ModuleType("__main__")
        module.__dict__.update(__file__=self._file, __package__=package, __spec__=self._spec)
        module.__dict__.update(__builtins__=__builtins__, __loader__=None, __cached__=None)
        try:
            exec(self._code, module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ConfigurationError(f"the script ended itself with status {end.code}") from end


class RankFunction:
    """``fn(rank)``, with a default process group."""

    def __init__(self, fn: Callable[[int], object]) -> None:
        self._fn, self.name = fn, getattr(fn, "__name__", "function")

    def beginning(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, rank: Rank) -> object:
        """Runs in the rank's thread."""
        dist.init_process_group("gloo")
        return self._fn(rank.number)


def spawning(outside: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wraps ``torch.multiprocessing.spawn``: a rank that starts W ranks goes on as one of them."""

    def spawn(
        fn: Callable[..., object], args: Args = (), nprocs: int = 1, *more: object, **kwargs: object
    ) -> Tree:
        if (rank := current()) is None:
            return outside(fn, args, nprocs, *more, **kwargs)
        if nprocs != rank.world_size:
            raise ConfigurationError(
                f"the script spawns {nprocs} processes, and the rehearsal has {rank.world_size} ranks; rehearse with "
                f"--ranks {nprocs}, or let the script spawn as many"
            )
        fn(rank.number, *args)
        # as with join=False: processes that have ended
        return SimpleNamespace(join=lambda *args, **kwargs: True)

    return spawn


# ------------------------------------------------------------ the first bit in which runs differ
class RankPart(NamedTuple):
    """Values of one parameter that a rank has after a step: from ``start`` on, of ``numel`` in all."""

    start: int
    numel: int
    values: torch.Tensor


Parts = dict[str, RankPart]


@dataclass(frozen=True)
class BitsReport:
    """Compares what runs on several numbers of ranks have left.

    Attributes:
        reports: of each number of ranks.
        partings: where each leaves the first one, in words; none where all bits are equal.
    """

    reports: dict[int, Report]
    partings: list[str]

    @property
    def is_good(self) -> bool:
        """Says whether all ranks came to their end, with the same bits."""
        return not self.partings and self._steps() > 0 and all(r.is_good for r in self.reports.values())

    def _steps(self) -> int:
        return min(report.ranks[0].steps for report in self.reports.values())

    def __str__(self) -> str:
        broken = [str(report) for report in self.reports.values() if not report.is_good]
        sizes, steps = ", ".join(map(str, self.reports)), self._steps()
        same = f"the same bits on {sizes} ranks: losses and parameters of {steps} steps"
        if not steps:
            same = "no optimizer has made a step, so that nothing was compared"
        return "\n".join([*broken, *(self.partings or ([] if broken else [same]))])


def rehearse_bits(
    target: str | os.PathLike[str] | Callable[[int], object], ranks: Sequence[int], **options: Tree
) -> BitsReport:
    """Rehearses an unchanged script on each number of ranks, and compares losses and parameters after each step.

    Micro-batches are numbered as in docs/SAME_BITS.md. Parameters of all steps of two runs are kept in memory.

    Args:
        options: as of :func:`rehearse`: steps, arguments, is_module, timeout, cpu.
    """
    reports: dict[int, Report] = {}
    partings: list[str] = []
    first: Trace = []
    for size in ranks:
        taken: list[list[Parts]] = [[] for _ in range(size)]

        def take(rank: int, optimizer: Optimizer, taken: list[list[Parts]] = taken) -> None:
            taken[rank].append(parts_of(optimizer))

        report = reports[size] = rehearse(target, size, show=(), memory=False, after_step=take, **options)
        steps = enumerate(zip(*taken, strict=False))
        whole = [Moment(_losses(report, k), parameters=_joined(parts)) for k, parts in steps]
        if size == ranks[0]:
            first = whole
        elif report.is_good and reports[ranks[0]].is_good and (found := first_parting(whole, first, EXACT)):
            partings.append(f"{size} ranks and {ranks[0]} part at {found}: {found.detail}")
    return BitsReport(reports, partings)


def parts_of(optimizer: Optimizer) -> Parts:
    """Copies what this rank has of the parameters that an optimizer steps over."""
    found: Parts = {}
    for group in optimizer.param_groups:
        numbered = [f"parameter {len(found) + k}" for k in range(len(group["params"]))]
        for name, listed in zip(group.get("param_names") or numbered, group["params"], strict=True):
            param = changed_by_steps(listed)
            listing = listing_of(param)
            with as_plain(), torch.no_grad():
                values = local_of(param).detach().reshape(-1).clone()
            if listing is None:
                found[name] = RankPart(0, values.numel(), values)
                continue
            for item, start, rank, offset, numel, runs in listing.layout.pieces():
                if rank == listing.group.rank:
                    if runs > 1:
                        raise ConfigurationError(
                            f"bits of {name!r}, which is not cut between its rows, can't be told"
                        )
                    path = (listing.flat.path_of(listing.first + item), listing.names[item])
                    part = RankPart(start, listing.layout.numels[item], values[offset : offset + numel])
                    found[".".join(filter(None, path))] = part
    return found


def _joined(step: Sequence[Parts]) -> Tensors:
    found: Tensors = {}
    for parts in step:
        for name, (start, numel, values) in parts.items():
            if name not in found:
                found[name] = values.new_zeros(numel)
            found[name][start : start + len(values)] = values
    return found


def _losses(report: Report, step: int) -> list[float]:
    """Lists all ranks' of a step, by the number of the micro-batch."""
    each = [seen.losses[step] for seen in report.ranks]
    most = max(map(len, each))
    return [losses[k] for k in range(most) for losses in each if k < len(losses)]
