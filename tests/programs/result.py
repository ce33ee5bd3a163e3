"""What ranks saw while running a program, and the comparison of two such runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.testing.comparing import (
    DOUBLE,
    SINGLE,
    Difference,
    Tolerance,
    check_named,
    check_numbers,
    check_optimizer_state,
)

from .spec import Program

Tensors = dict[str, torch.Tensor]


@dataclass
class Moment:
    """What one rank saw at one step of a program; what was not looked at is empty or None.

    Attributes:
        grads: name -> gradient (None: no gradient) of parameters whose gradient has to be complete on this rank.
        states: one optimizer state dict for each optimizer.
    """

    index: int
    kind: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] | None = None
    params: Tensors | None = None
    buffers: Tensors | None = None
    states: list[dict[str, Any]] | None = None


@dataclass
class Checkpoint:
    """What one run hands to the next: model and optimizers, and whether the late group was added."""

    model: Tensors
    optimizers: list[dict[str, Any]]
    late_added: bool = False


@dataclass
class RankRun:
    """One rank's course through a program.

    Attributes:
        partition: for each optimizer, for each rank, names of the parameters it owns (empty for the truth).
    """

    moments: list[Moment]
    partition: list[list[list[str]]]
    checkpoint: Checkpoint | None = None


HALF_WIRE = Tolerance(2e-2, 2e-3)


def tolerance_for(program: Program) -> Tolerance:
    """What rounding may do to a program, given its dtypes."""
    if program.options.reduce_fp16 or program.options.broadcast_fp16:
        return HALF_WIRE
    single = program.model.dtype == "float32" or "mixed_dtype" in program.model.blocks
    return SINGLE if single else DOUBLE


def compare(
    got: Sequence[RankRun],
    want: Sequence[RankRun],
    tolerance: Tolerance,
    *,
    buffers_of: Sequence[int] | None = None,
    partition: bool = False,
) -> None:
    """Compares what every rank saw, step by step.

    Args:
        buffers_of: ranks whose buffers are compared; None means all.
        partition: owners have to be the same, too.

    Raises:
        Difference: naming rank, step and what differs.
    """
    for rank, (mine, other) in enumerate(zip(got, want, strict=True)):
        if partition and mine.partition != other.partition:
            raise Difference(f"rank {rank}: partition {mine.partition} instead of {other.partition}")
        for a, b in zip(mine.moments, other.moments, strict=True):
            where = f"rank {rank}, step {a.index} ({a.kind}): "
            check_numbers(where + "losses", a.losses, b.losses, tolerance)
            check_numbers(where + "norms", a.norms, b.norms, tolerance)
            check_numbers(where + "learning rates", a.lrs, b.lrs, tolerance)
            if a.grads is not None and b.grads is not None:
                check_named(where + "gradient", a.grads, b.grads, tolerance, only_got=True)
            if a.params is not None and b.params is not None:
                check_named(where + "value", a.params, b.params, tolerance)
            if a.buffers is not None and b.buffers is not None and (buffers_of is None or rank in buffers_of):
                check_named(where + "buffer", a.buffers, b.buffers, tolerance)
            if a.states is not None and b.states is not None:
                for i, (s, t) in enumerate(zip(a.states, b.states, strict=True)):
                    check_optimizer_state(where + f"state dict of optimizer {i}", s, t, tolerance)
