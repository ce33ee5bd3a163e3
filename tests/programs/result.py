"""What ranks saw while running a program, and the comparison of two such runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.tools.verify import (
    BFLOAT,
    DOUBLE,
    HALF,
    SINGLE,
    Difference,
    Tolerance,
    check_named,
    check_numbers,
    check_optimizer_state,
    check_value,
)

from .spec import Program

Tensors = dict[str, torch.Tensor]


@dataclass
class Formats:
    """What FSDP writes for others to read, as plain data.

    Attributes:
        parameters: names and shapes that ``named_parameters()`` yields.
        local: ``local_state_dict()``.
        metadata: ``local_metadata_dict()``.
        optimizer: what ``gather_full_optim_state_dict()`` returned on this rank; {} if it was not asked.
    """

    parameters: list[tuple[str, tuple[int, ...]]]
    local: Tensors
    metadata: dict[str, Any]
    optimizer: dict[str, Any] | None


@dataclass
class Moment:
    """What one rank saw at one step of a program; what was not looked at is empty or None.

    Attributes:
        grads: name -> gradient (None: no gradient) of parameters whose gradient has to be complete on this rank.
        states: one optimizer state dict for each optimizer.
        state: the model's full state dict.
        summoned: parameters by name within ``summon_full_params``.
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
    state: Tensors | None = None
    summoned: Tensors | None = None
    formats: Formats | None = None


@dataclass
class Checkpoint:
    """What a run of OSS hands to the next: model and optimizers, and whether the late group was added."""

    model: Tensors
    optimizers: list[dict[str, Any]]
    late_added: bool = False


@dataclass
class Saved:
    """What a run of FSDP leaves for another one, maybe of another library or number of ranks.

    Attributes:
        full: full state dict.
        local: each rank's local state dict and metadata.
        optimizer: the optimizer's full state dict.
        count: number of forwards so far.
    """

    full: Tensors
    local: list[tuple[Tensors, dict[str, Any]]]
    optimizer: dict[str, Any]
    count: int


@dataclass
class RankRun:
    """One rank's course through a program.

    Attributes:
        partition: for each OSS, for each rank, names of the parameters it owns (empty for the truth).
        saved: what it leaves, where that was asked for.
    """

    moments: list[Moment]
    partition: list[list[list[str]]] = field(default_factory=list)
    saved: Checkpoint | Saved | None = None


HALF_WIRE = Tolerance(2e-2, 2e-3)
# A variance is a difference of squares: in fp32 one process alone is this far from one in fp64.
CENTERED = Tolerance(2e-5, 2e-5)


def tolerance_for(program: Program) -> Tolerance:
    """What rounding may do to a program, given its dtypes."""
    sharded = program.sharded
    if sharded is not None and (sharded.reduce_fp16 or sharded.broadcast_fp16):
        return HALF_WIRE
    low = {o.low_dtype for _, o in program.units()} - {None, torch.float32}
    if low:
        return BFLOAT if torch.bfloat16 in low else HALF
    if program.model.dtype == "bfloat16":
        return BFLOAT
    single = program.model.dtype == "float32" or "mixed_dtype" in program.model.kinds
    if single and program.optimizer.name == "rmsprop":
        return CENTERED
    return SINGLE if single else DOUBLE


def _check_tensors(
    where: str, got: Tensors | None, want: Tensors | None, tolerance: Tolerance, ordered: bool
) -> None:
    if got is None or want is None:
        return
    if ordered and list(got) != list(want):
        raise Difference(where, f"names {list(got)} instead of {list(want)}")
    check_named(where, got, want, tolerance)


def _check_formats(where: str, got: Formats, want: Formats, tolerance: Tolerance, ordered: bool) -> None:
    check_value(f"{where}, named_parameters", got.parameters, want.parameters, tolerance)
    _check_tensors(f"{where}, local state dict", got.local, want.local, tolerance, ordered)
    check_value(f"{where}, metadata", got.metadata, want.metadata, tolerance)
    if {} not in (got.optimizer, want.optimizer):
        check_value(f"{where}, optimizer state", got.optimizer, want.optimizer, tolerance)


def compare_moment(
    rank: int, got: Moment, want: Moment, tolerance: Tolerance, *, ordered: bool = True, buffers: bool = True
) -> None:
    """Compares what a rank saw in two runs at one step.

    Args:
        ordered: names have to come in the same order, too (fairscale puts tied ones last).
        buffers: whether they are compared.

    Raises:
        Difference: naming rank, step and what differs.
    """
    where = f"rank {rank}, step {got.index} ({got.kind}): "
    check_numbers(where + "losses", got.losses, want.losses, tolerance)
    check_numbers(where + "norms", got.norms, want.norms, tolerance)
    check_numbers(where + "learning rates", got.lrs, want.lrs, tolerance)
    if got.grads is not None and want.grads is not None:
        check_named(where + "gradient", got.grads, want.grads, tolerance, only_got=True)
    _check_tensors(where + "value", got.params, want.params, tolerance, ordered)
    if buffers:
        _check_tensors(where + "buffer", got.buffers, want.buffers, tolerance, ordered)
    _check_tensors(where + "state", got.state, want.state, tolerance, ordered)
    _check_tensors(where + "summoned", got.summoned, want.summoned, tolerance, ordered)
    if got.states is not None and want.states is not None:
        for i, (s, t) in enumerate(zip(got.states, want.states, strict=True)):
            check_optimizer_state(where + f"state dict of optimizer {i}", s, t, tolerance)
    if got.formats is not None and want.formats is not None:
        _check_formats(where + "formats", got.formats, want.formats, tolerance, ordered)


def compare(
    got: Sequence[RankRun],
    want: Sequence[RankRun],
    tolerance: Tolerance,
    *,
    ordered: bool = True,
    buffers_of: Sequence[int] | None = None,
    partition: bool = False,
) -> None:
    """Compares what every rank saw, step by step; see :func:`compare_moment`.

    Args:
        buffers_of: ranks whose buffers are compared; None means all.
        partition: owners have to be the same, too.
    """
    for rank, (mine, other) in enumerate(zip(got, want, strict=True)):
        if partition and mine.partition != other.partition:
            raise Difference(f"rank {rank}: partition", f"{mine.partition} instead of {other.partition}")
        buffers = buffers_of is None or rank in buffers_of
        for a, b in zip(mine.moments, other.moments, strict=True):
            compare_moment(rank, a, b, tolerance, ordered=ordered, buffers=buffers)
