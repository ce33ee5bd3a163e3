"""Runs programs on pools of ranks, and says how many of them a test may draw."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings

from tests.differential.keeping import kept
from tests.pools import rank_pool

from .ranks import run_rank
from .result import Checkpoint, RankRun, compare, tolerance_for
from .spec import Program
from .truth import run_truth

FUZZ = int(os.environ.get("SHARDKIT_FUZZ", "1"))
SHRINK = bool(os.environ.get("SHARDKIT_SHRINK"))
SECONDS = 60.0

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


def run_ranks(
    library: str, program: Program, world_size: int, start: Checkpoint | None = None, backend: str = "gloo"
) -> list[RankRun]:
    """Each rank's course through ``program`` with a library: "fairscale", "shardkit" (its paths) or "core"."""
    pool: Any = rank_pool(world_size, backend)
    pool.timeout = SECONDS
    packed = None if start is None else pickle.dumps(start)
    return [pickle.loads(b) for b in pool.run(run_rank, library, program, packed)]


@kept
def check_against_truth(
    program: Program, world_size: int, library: str = "shardkit", backend: str = "gloo"
) -> None:
    """Runs a program on ranks and in one process, and compares what both saw."""
    got = run_ranks(library, program, world_size, backend=backend)
    # fairscale brings buffers around at the next forward; between forwards only rank 0's are right
    compare(
        got,
        run_truth(program, world_size),
        tolerance_for(program),
        buffers_of=[0] if library == "fairscale" or program.options.wrapper == "ddp" else None,
    )
