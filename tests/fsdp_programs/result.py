"""What ranks saw while running a program, and the comparison of two such runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.testing.comparing import (
    BFLOAT,
    DOUBLE,
    HALF,
    SINGLE,
    Difference,
    Tolerance,
    check_numbers,
    check_value,
)

from .spec import Program

Tensors = dict[str, torch.Tensor]


@dataclass
class Formats:
    """What a library writes for others to read, as plain data.

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
class Saved:
    """What a run leaves for another one, maybe of another library or number of ranks.

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
class Moment:
    """What one rank saw at one step of a program; what was not looked at is empty or None.

    Attributes:
        state: the full state dict.
        summoned: parameters by name within ``summon_full_params``.
    """

    index: int
    kind: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: Tensors | None = None
    summoned: Tensors | None = None
    formats: Formats | None = None


def tolerance_for(program: Program) -> Tolerance:
    """What rounding may do to a program, given its dtypes."""
    low = {o.low_dtype for _, o in program.units()} - {None, torch.float32}
    if low:
        return BFLOAT if torch.bfloat16 in low else HALF
    if program.model.dtype == "bfloat16":
        return BFLOAT
    single = program.model.dtype == "float32" or "mixed_dtype" in program.model.kinds
    return SINGLE if single else DOUBLE


def _check_tensors(
    where: str, got: Tensors | None, want: Tensors | None, tolerance: Tolerance, ordered: bool
) -> None:
    if got is None or want is None:
        return
    order = list if ordered else sorted
    if order(got) != order(want):
        raise Difference(f"{where}: names {list(got)} instead of {list(want)}")
    for name, value in got.items():
        check_value(f"{where} of {name}", value, want[name], tolerance)


def _check_formats(where: str, got: Formats, want: Formats, tolerance: Tolerance, ordered: bool) -> None:
    check_value(f"{where}, named_parameters", got.parameters, want.parameters, tolerance)
    _check_tensors(f"{where}, local state dict", got.local, want.local, tolerance, ordered)
    check_value(f"{where}, metadata", got.metadata, want.metadata, tolerance)
    if {} not in (got.optimizer, want.optimizer):
        check_value(f"{where}, optimizer state", got.optimizer, want.optimizer, tolerance)


def compare_moment(rank: int, got: Moment, want: Moment, tolerance: Tolerance, ordered: bool = True) -> None:
    """Compares what a rank saw in two runs at one step.

    Args:
        ordered: names have to come in the same order, too (fairscale puts tied ones last).

    Raises:
        Difference: naming rank, step and what differs.
    """
    where = f"rank {rank}, step {got.index} ({got.kind}): "
    check_numbers(where + "losses", got.losses, want.losses, tolerance)
    check_numbers(where + "norms", got.norms, want.norms, tolerance)
    _check_tensors(where + "state", got.state, want.state, tolerance, ordered)
    _check_tensors(where + "summoned", got.summoned, want.summoned, tolerance, ordered)
    if got.formats is not None and want.formats is not None:
        _check_formats(where + "formats", got.formats, want.formats, tolerance, ordered)


def compare(
    got: Sequence[Sequence[Moment]],
    want: Sequence[Sequence[Moment]],
    tolerance: Tolerance,
    ordered: bool = True,
) -> None:
    """Compares what every rank saw, step by step (the outer sequences are ranks)."""
    for rank, (mine, other) in enumerate(zip(got, want, strict=True)):
        for a, b in zip(mine, other, strict=True):
            compare_moment(rank, a, b, tolerance, ordered)
