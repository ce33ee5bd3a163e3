"""Drawn ways to lose each other: one rank does something else at some step, and every rank has to hear of it.

Ranks are the threads of the simulated backend, so that many can be drawn; ``tests/faults/cases.py`` has what only
processes can do. SHARDKIT_FUZZ=n draws n times as many, and new ones.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ShardkitError
from tests.differential.keeping import kept
from tests.faults.programs import failing
from tests.faults.trainers import Trainer, make_trainer
from tests.pools import rank_pool
from tests.programs.running import examples

FAULTS = (
    "skips the batch", "one batch more", "skips backward", "no_sync", "raises in forward", "raises in backward",
    "swallows an error of forward", "swallows an error of backward", "returns", "collects", "evaluates",
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """How one rank leaves the others.

    Attributes:
        steps: of training, then all ranks collect their state.
        where: the step in which it happens.
        rank: to whom.
    """

    strategy: str
    world_size: int
    steps: int
    where: int
    rank: int
    fault: str


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    world_size, steps = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return Loss(
        draw(st.sampled_from(["fsdp", "sharded_ddp"])),
        world_size,
        steps,
        draw(st.integers(0, steps - 1)),
        draw(st.integers(0, world_size - 1)),
        draw(st.sampled_from(FAULTS)),
    )


def _other_step(trainer: Trainer, fault: str) -> None:
    if fault == "one batch more":
        trainer.step()
        trainer.step()
    elif fault == "skips backward":
        trainer.forward()
    elif fault == "no_sync":
        with trainer.no_sync():
            trainer.step()
    elif fault.startswith(("raises", "swallows")):
        swallowed = (
            contextlib.suppress(ValueError) if fault.startswith("swallows") else contextlib.nullcontext()
        )
        with swallowed, failing(trainer, in_backward=fault.endswith("backward")):
            trainer.step()
    elif fault == "collects":
        trainer.collect()
        trainer.step()
    elif fault == "evaluates":
        trainer.forward()
        trainer.step()


def _ends_with(rank: int, loss: Loss) -> str:
    trainer = make_trainer(loss.strategy)
    try:
        for step in range(loss.steps):
            if rank != loss.rank or step != loss.where:
                trainer.step()
            elif loss.fault == "returns":
                return "returned"
            else:
                _other_step(trainer, loss.fault)
        trainer.collect()
    except ShardkitError:
        return "ShardkitError"
    except ValueError as error:
        return str(error)
    return "nothing"


@kept
def check_every_rank_hears_of_it(loss: Loss) -> None:
    """Every other rank ends with an error of shardkit's; the one that caused it with that, or with its own."""
    ends: list[Any] = rank_pool(loss.world_size, "simulated").run(_ends_with, loss)
    own = {"returns": {"returned"}}.get(loss.fault, {"ShardkitError", "boom"})
    assert ends[loss.rank] in own, ends
    assert {e for r, e in enumerate(ends) if r != loss.rank} == {"ShardkitError"}, ends


@given(losses())
@examples(150)
def test_every_rank_hears_of_it(loss: Loss) -> None:
    check_every_rank_hears_of_it(loss)
