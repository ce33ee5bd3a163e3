"""What ranks saw while running a program, and the comparison of two such runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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


@dataclass(frozen=True)
class Tolerance:
    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
DOUBLE = Tolerance(1e-9, 1e-11)
SINGLE = Tolerance(2e-5, 2e-6)
HALF_WIRE = Tolerance(2e-2, 2e-3)


def tolerance_for(program: Program) -> Tolerance:
    """What rounding may do to a program, given its dtypes."""
    if program.options.reduce_fp16 or program.options.broadcast_fp16:
        return HALF_WIRE
    single = program.model.dtype == "float32" or "mixed_dtype" in program.model.blocks
    return SINGLE if single else DOUBLE


class Difference(AssertionError):
    """Two runs of the same program disagree."""


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.to_dense() if t.is_sparse else t


def _check_tensor(where: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    got, want = _dense(got), _dense(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Difference(
            f"{where}: {tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
        )
    if torch.equal(got, want):
        return
    if not want.is_floating_point():
        raise Difference(f"{where}: {got} instead of {want}")
    wide_got, wide_want = got.double(), want.double()
    if torch.allclose(wide_got, wide_want, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True):
        return
    gap = (wide_got - wide_want).abs().max().item()
    raise Difference(
        f"{where}: differs by {gap:.3g}\n  got  {got.flatten()[:8]}\n  want {want.flatten()[:8]}"
    )


def check_numbers(where: str, got: Sequence[float], want: Sequence[float], tolerance: Tolerance) -> None:
    same = len(got) == len(want) and all(
        math.isclose(a, b, rel_tol=max(tolerance.relative, 1e-12), abs_tol=tolerance.absolute)
        or (math.isnan(a) and math.isnan(b))
        for a, b in zip(got, want, strict=True)
    )
    if not same:
        raise Difference(f"{where}: {list(got)} instead of {list(want)}")


def _check_named(
    where: str,
    got: dict[str, Any],
    want: dict[str, Any],
    tolerance: Tolerance,
    only_got: bool = False,
) -> None:
    """``only_got``: names that ``got`` lacks are not looked at (a rank reports its own part)."""
    if not only_got and set(got) != set(want):
        raise Difference(f"{where}: names {sorted(got)} instead of {sorted(want)}")
    for name, value in got.items():
        expected = want[name]
        if (value is None) != (expected is None):
            found = "None" if value is None else f"{_dense(value).flatten()[:8]}"
            other = "None" if expected is None else f"{_dense(expected).flatten()[:8]}"
            raise Difference(f"{where} of {name}: {found} instead of {other}")
        if value is not None:
            _check_tensor(f"{where} of {name}", value, expected, tolerance)


def check_optimizer_state(
    where: str, got: dict[str, Any], want: dict[str, Any], tolerance: Tolerance, key_type: bool = True
) -> None:
    """Two optimizer state dicts in torch's format: same keys, same order of states, same values."""
    if set(got) != set(want):
        raise Difference(f"{where}: keys {sorted(got)} instead of {sorted(want)}")
    if list(got["state"]) != sorted(want["state"]):
        raise Difference(f"{where}: states of {list(got['state'])} instead of {sorted(want['state'])}")
    for index, state in got["state"].items():
        check_value(f"{where}, state of parameter {index}", state, want["state"][index], tolerance)
    check_value(f"{where}, groups", got["param_groups"], want["param_groups"], tolerance)


def check_value(where: str, got: Any, want: Any, tolerance: Tolerance) -> None:
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            raise Difference(f"{where}: {got!r:.300} instead of {want!r:.300}")
        for key in want:
            check_value(f"{where}[{key!r}]", got[key], want[key], tolerance)
    elif isinstance(want, (list, tuple)):
        if not isinstance(got, type(want)) or len(got) != len(want):
            raise Difference(f"{where}: {got!r:.300} instead of {want!r:.300}")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            check_value(f"{where}[{i}]", a, b, tolerance)
    elif isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            raise Difference(f"{where}: {got!r:.300} instead of a tensor")
        _check_tensor(where, got, want, tolerance)
    elif isinstance(want, float) and isinstance(got, float):
        check_numbers(where, [got], [want], tolerance)
    elif got != want:
        raise Difference(f"{where}: {got!r:.300} instead of {want!r:.300}")


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
                _check_named(where + "gradient", a.grads, b.grads, tolerance, only_got=True)
            if a.params is not None and b.params is not None:
                _check_named(where + "value", a.params, b.params, tolerance)
            if a.buffers is not None and b.buffers is not None and (buffers_of is None or rank in buffers_of):
                _check_named(where + "buffer", a.buffers, b.buffers, tolerance)
            if a.states is not None and b.states is not None:
                for i, (s, t) in enumerate(zip(a.states, b.states, strict=True)):
                    check_optimizer_state(where + f"state dict of optimizer {i}", s, t, tolerance)
