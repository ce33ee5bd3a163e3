"""Runs programs on ranks, compares what these saw, and says how many of them a test may draw.

A drawn program runs on simulated ranks, which are threads of this process. One in ten runs on processes over gloo, and
so does whatever needs processes. Which ones, the program's own text says.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings

from tests.differential.keeping import kept
from tests.pools import rank_pool

from .owning_ranks import OwningRank
from .ranks import Rank
from .result import Checkpoint, RankRun, Saved, compare, tolerance_for
from .spec import AnyStep, Program, Unit
from .truth import Truth, run_truth
from .unit_ranks import UnitRank

FUZZ = int(os.environ.get("SHARDKIT_FUZZ", "1"))
SHRINK = bool(os.environ.get("SHARDKIT_SHRINK"))
SECONDS = 60.0
ON_PROCESSES = 10  # one drawn program in so many

F = TypeVar("F", bound=Callable[..., Any])


def examples(count: int) -> Callable[[F], F]:
    """Hypothesis settings: ``count`` examples, always the same ones; with SHARDKIT_FUZZ=n, n times as many new ones.

    SHARDKIT_SHRINK=1 makes a failing example small (minutes).
    """
    return settings(
        max_examples=count * FUZZ,
        derandomize=FUZZ == 1,
        database=None,
        deadline=None,
        # A failure ends the ranks, and shrinking fails a hundred times.
        phases=[Phase.explicit, Phase.generate] + ([Phase.shrink] if SHRINK else []),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


# ------------------------------------------------------------------------------------------------ on a rank
def make_rank(library: str, program: Program, start: Checkpoint | None = None) -> Rank:
    """This rank's course; ``library`` is "fairscale", "shardkit" (its paths) or "core"."""
    if program.sharded is None:
        return UnitRank(library, program)
    return OwningRank(library, program, start)


def run_rank(rank: int, library: str, program: Program, start: bytes | None = None) -> bytes:
    """What this rank saw, pickled: tensors in a queue between processes would travel as file descriptors."""
    return pickle.dumps(make_rank(library, program, None if start is None else pickle.loads(start)).run())


def save_rank(rank: int, library: str, program: Program) -> bytes:
    """Runs a program of FSDP, and keeps what it leaves."""
    course = UnitRank(library, program)
    course.run()
    return pickle.dumps(RankRun([], saved=course.save()))


def resume_rank(rank: int, library: str, program: Program, saved: bytes, form: str) -> bytes:
    """Runs a program of FSDP that goes on from what :func:`save_rank` left."""
    course = UnitRank(library, program)
    course.load(pickle.loads(saved), form)
    return pickle.dumps(course.run())


# ------------------------------------------------------------------------------------------------ on all ranks
def backend_of(program: Program, world_size: int) -> str:
    """Where shardkit runs a program: "simulated" or "gloo"."""
    if program.sharded is not None and program.sharded.wrapper == "ddp":
        return "gloo"
    return "simulated" if zlib.crc32(f"{program} {world_size}".encode()) % ON_PROCESSES else "gloo"


def pool_for(library: str, program: Program, world_size: int, backend: str = "") -> Any:
    """Ranks for a library.

    fairscale's FSDP has its own, since what makes it run on a CPU must reach nothing else.
    """
    if library == "fairscale":
        backend = "gloo" if program.sharded is not None else "fairscale"
    pool: Any = rank_pool(world_size, backend or backend_of(program, world_size))
    pool.timeout = SECONDS
    return pool


def _on_ranks(
    fn: Callable[..., bytes],
    library: str,
    program: Program,
    world_size: int,
    given: Checkpoint | Saved | None = None,
    form: str = "",
    *,
    backend: str = "",
) -> list[RankRun]:
    pool = pool_for(library, program, world_size, backend)
    args = ([] if given is None else [pickle.dumps(given)]) + ([form] if form else [])
    return [pickle.loads(b) for b in pool.run(fn, library, program, *args)]


def run_ranks(
    library: str,
    program: Program,
    world_size: int,
    start: Checkpoint | None = None,
    *,
    backend: str = "",
) -> list[RankRun]:
    """Each rank's course through ``program``; shardkit's on the backend given, or that :func:`backend_of` says."""
    return _on_ranks(run_rank, library, program, world_size, start, backend=backend)


def _compare_with_truth(got: list[RankRun], program: Program, world_size: int, library: str) -> None:
    theirs = library == "fairscale"
    # fairscale and DDP bring buffers around at the next forward; between forwards only rank 0's are right
    ddp = program.sharded is not None and (theirs or program.sharded.wrapper == "ddp")
    want = run_truth(program, world_size)
    compare(got, want, tolerance_for(program), ordered=not theirs, buffers_of=[0] if ddp else None)


@kept
def check_against_truth(
    program: Program, world_size: int, library: str = "shardkit", backend: str = ""
) -> None:
    """Runs a program on ranks and in one process, and compares what both saw."""
    got = run_ranks(library, program, world_size, backend=backend)
    _compare_with_truth(got, program, world_size, library)


@kept
def check_three_ways(program: Program, world_size: int) -> None:
    """Truth, fairscale and shardkit: a program on which fairscale is wrong shows as a missing limit of its own."""
    theirs = run_ranks("fairscale", program, world_size)
    _compare_with_truth(theirs, program, world_size, "fairscale")
    whole = program.sharded is not None
    compare(
        run_ranks("shardkit", program, world_size),
        theirs,
        tolerance_for(program),
        ordered=False,
        buffers_of=[0] if whole else None,
        partition=whole,
    )


@kept
def check_resumed(
    program: Program,
    steps: tuple[tuple[AnyStep, ...], tuple[AnyStep, ...]],
    writer: tuple[str, int],
    reader: tuple[str, int],
    form: str,
) -> None:
    """Runs the first steps of FSDP with one library and number of ranks, and goes on with another.

    With another number of ranks the truth goes on from the same values.

    Args:
        form: of the checkpoint's model: "full", "local" or "consolidated".
    """
    assert isinstance(program.options, Unit)
    before, after = (dataclasses.replace(program, steps=s) for s in steps)
    saved = _on_ranks(save_rank, writer[0], before, writer[1])[0].saved
    assert isinstance(saved, Saved)
    got = _on_ranks(resume_rank, reader[0], after, reader[1], saved, form)
    first = Truth(before, writer[1])
    first.run()
    second = Truth(after, reader[1])
    second.go_on_from(first, own_buffers=form == "local")
    compare(got, second.run(), tolerance_for(program), ordered=False)
