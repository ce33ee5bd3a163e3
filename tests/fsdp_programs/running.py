"""Runs programs on pools of ranks."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from tests.differential.keeping import kept
from tests.pools import rank_pool

from .ranks import resume_rank, run_rank, save_rank
from .result import Moment, compare, tolerance_for
from .spec import AnyStep, Program
from .truth import Truth, run_truth

SECONDS = 60.0


def pool_for(library: str, world_size: int) -> Any:
    """Ranks for a library: fairscale has its own, since what makes it run on a CPU must reach nothing else."""
    pool: Any = rank_pool(world_size, "fairscale" if library == "fairscale" else "gloo")
    pool.timeout = SECONDS
    return pool


def run_ranks(library: str, program: Program, world_size: int) -> list[list[Moment]]:
    """What each rank saw in ``program`` with a library: "fairscale" or "shardkit"."""
    return [pickle.loads(b) for b in pool_for(library, world_size).run(run_rank, library, program)]


@kept
def check_against_truth(program: Program, world_size: int, library: str = "shardkit") -> None:
    """Runs a program on ranks and in one process, and compares what both saw."""
    got, want = run_ranks(library, program, world_size), run_truth(program, world_size)
    compare(got, want, tolerance_for(program), ordered=library != "fairscale")


@kept
def check_three_ways(program: Program, world_size: int) -> None:
    """Truth, fairscale and shardkit: a program on which fairscale is wrong shows as a missing limit of its own."""
    tolerance = tolerance_for(program)
    theirs = run_ranks("fairscale", program, world_size)
    compare(theirs, run_truth(program, world_size), tolerance, ordered=False)
    compare(run_ranks("shardkit", program, world_size), theirs, tolerance, ordered=False)


@kept
def check_resumed(
    program: Program,
    steps: tuple[tuple[AnyStep, ...], tuple[AnyStep, ...]],
    writer: tuple[str, int],
    reader: tuple[str, int],
    form: str,
) -> None:
    """Runs the first steps with one library and number of ranks, and goes on with another.

    With another number of ranks the truth goes on from the same values.

    Args:
        form: of the checkpoint's model: "full", "local" or "consolidated".
    """
    before, after = (dataclasses.replace(program, steps=s) for s in steps)
    saved = pool_for(*writer).run(save_rank, writer[0], before)[0]
    got = [pickle.loads(b) for b in pool_for(*reader).run(resume_rank, reader[0], after, saved, form)]
    first = Truth(before, writer[1])
    first.run()
    second = Truth(after, reader[1])
    second.go_on_from(first, own_buffers=form == "local")
    compare(got, second.run(), tolerance_for(program), ordered=False)
