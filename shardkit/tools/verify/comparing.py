"""Comparing what two runs of the same training saw: numbers, tensors, state dicts; the first difference is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...torch_seams.tensors import differing
from ...types import StateDict, Tree


@dataclass(frozen=True)
class Tolerance:
    """Two values agree where they are within ``absolute + relative * |expected|``, element by element.

    Where both are 0, all bits have to be equal.
    """

    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
DOUBLE = Tolerance(1e-9, 1e-11)
SINGLE = Tolerance(2e-5, 2e-6)
HALF = Tolerance(3e-2, 6e-3)
BFLOAT = Tolerance(1e-1, 3e-2)
_OF_DTYPE = {torch.float64: DOUBLE, torch.float32: SINGLE, torch.float16: HALF, torch.bfloat16: BFLOAT}


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """Returns what rounding may do to a few steps of training that compute in ``dtype``."""
    return _OF_DTYPE.get(dtype, SINGLE)


class Difference(AssertionError):
    """Two runs disagree; the message says where, by how much, and shows values of both.

    Attributes:
        where: what differs.
        gap: largest absolute difference; nan where sizes, types or names differ.
    """

    def __init__(self, where: str, message: str, gap: float = math.nan) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
        self.gap = gap


def dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.to_dense() if t.is_sparse else t


def check_tensor(where: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    """Raises Difference unless shapes and dtypes are the same and values agree."""
    got, want = dense(got), dense(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Difference(where, f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}")
    if tolerance == EXACT:
        _check_bits(where, got.flatten(), want.flatten())
        return
    if torch.equal(got, want):
        return
    if not (want.is_floating_point() or want.is_complex()):
        raise Difference(where, f"{got} instead of {want}")
    wide = torch.complex128 if want.is_complex() else torch.float64
    close = torch.allclose(
        got.to(wide), want.to(wide), rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True
    )
    if not close:
        _, gap = differing(got, want)
        shown = f"\n  got  {got.flatten()[:8]}\n  want {want.flatten()[:8]}"
        raise Difference(where, f"differs by {gap:.3g}{shown}", gap)


def _check_bits(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
    bits = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (got, want) if t.numel()]
    differs = (bits[0] != bits[1]).any(1) if bits else torch.zeros(0)
    if differs.any():
        k = int(differs.int().argmax())
        a, b = got[k].item(), want[k].item()
        raise Difference(f"{where}, element {k}", f"{a!r} instead of {b!r}", float(abs(a - b)))


def check_numbers(where: str, got: Sequence[float], want: Sequence[float], tolerance: Tolerance) -> None:
    """Does the same for plain numbers; nan agrees with nan."""
    relative = 0.0 if tolerance == EXACT else max(tolerance.relative, 1e-12)
    same = len(got) == len(want) and all(
        math.isclose(a, b, rel_tol=relative, abs_tol=tolerance.absolute) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(got, want, strict=True)
    )
    if not same:
        gap = max((abs(a - b) for a, b in zip(got, want, strict=False)), default=math.nan)
        raise Difference(where, f"{list(got)} instead of {list(want)}", gap)


def check_named(
    where: str,
    got: Mapping[str, torch.Tensor | None],
    want: Mapping[str, torch.Tensor | None],
    tolerance: Tolerance,
    only_got: bool = False,
) -> None:
    """Does the same for tensors by name, in ``got``'s order; None (no gradient, say) agrees with None only.

    Args:
        only_got: names that ``got`` lacks are not looked at (a rank reports its own part).
    """
    if not only_got and set(got) != set(want):
        raise Difference(where, f"names {sorted(got)} instead of {sorted(want)}")
    for name, value in got.items():
        expected = want[name]
        if value is None or expected is None:
            if value is not expected:
                shown = ["None" if v is None else f"{dense(v).flatten()[:8]}" for v in (value, expected)]
                raise Difference(f"{where} of {name}", f"{shown[0]} instead of {shown[1]}")
        else:
            check_tensor(f"{where} of {name}", value, expected, tolerance)


def check_value(where: str, got: Tree, want: Tree, tolerance: Tolerance) -> None:
    """Does the same for nested dicts, lists and tuples of tensors and plain values, such as state dicts."""
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            raise Difference(where, f"{got!r:.300} instead of {want!r:.300}")
        for key in want:
            check_value(f"{where}[{key!r}]", got[key], want[key], tolerance)
    elif isinstance(want, (list, tuple)):
        if not isinstance(got, type(want)) or len(got) != len(want):
            raise Difference(where, f"{got!r:.300} instead of {want!r:.300}")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            check_value(f"{where}[{i}]", a, b, tolerance)
    elif isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            raise Difference(where, f"{got!r:.300} instead of a tensor")
        check_tensor(where, got, want, tolerance)
    elif isinstance(want, float) and isinstance(got, float):
        check_numbers(where, [got], [want], tolerance)
    elif got != want:
        raise Difference(where, f"{got!r:.300} instead of {want!r:.300}")


def check_optimizer_state(where: str, got: StateDict, want: StateDict, tolerance: Tolerance) -> None:
    """Does so for optimizer state dicts in torch's format, whose states have to come in the order of parameters."""
    if set(got) != set(want):
        raise Difference(where, f"keys {sorted(got)} instead of {sorted(want)}")
    if list(got["state"]) != sorted(want["state"]):
        raise Difference(where, f"states of {list(got['state'])} instead of {sorted(want['state'])}")
    for index, state in got["state"].items():
        check_value(f"{where}, state of parameter {index}", state, want["state"][index], tolerance)
    check_value(f"{where}, groups", got["param_groups"], want["param_groups"], tolerance)


# ------------------------------------------------------------ what runs saw
Tensors = dict[str, torch.Tensor]


@dataclass
class Moment:
    """One step of a run, under the plain model's names.

    Attributes:
        losses: of each micro-batch; of each rank, where these have one.
        gradients: mean over ranks, complete; zeros for a parameter that got none.
        parameters: after the optimizer's step, complete.
        buffers: rank 0's, after the step.
    """

    losses: list[float]
    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


Trace = list[Moment]


@dataclass(frozen=True)
class Parting:
    """The first place where a run leaves another one.

    Attributes:
        step: counted from 0.
        what: "loss of micro-batch 1", "gradient of 0.weight", "value of 0.weight", "buffer ..."; ", element 3" where
            bits are compared.
        gap: largest absolute difference there; nan where names, shapes or dtypes differ.
        detail: values of both.
    """

    step: int
    what: str
    gap: float
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}, by {self.gap:.3g}"


def first_parting(got: Sequence[Moment], want: Sequence[Moment], tolerance: Tolerance) -> Parting | None:
    """Finds where ``got`` first leaves ``want``; None if it doesn't.

    Within a step: losses, then gradients, parameters and buffers, each in the model's order.
    """
    for step, (a, b) in enumerate(zip(got, want, strict=False)):
        try:
            for k, (mine, other) in enumerate(zip(a.losses, b.losses, strict=False)):
                check_numbers(f"loss of micro-batch {k}", [mine], [other], tolerance)
            if len(a.losses) != len(b.losses):
                raise Difference("losses", f"{len(a.losses)} micro-batches instead of {len(b.losses)}")
            for what, part in (("gradient", "gradients"), ("value", "parameters"), ("buffer", "buffers")):
                check_named(what, getattr(a, part), getattr(b, part), tolerance)
        except Difference as difference:
            return Parting(step, difference.where, difference.gap, str(difference))
    if len(got) != len(want):
        detail = f"{len(got)} steps instead of {len(want)}"
        return Parting(min(len(got), len(want)), "the end", math.nan, detail)
    return None


def largest_difference(got: Sequence[Moment], want: Sequence[Moment]) -> float:
    """Finds the largest absolute difference of any gradient or parameter in two runs with the same names and shapes."""
    return max(
        (
            differing(dense(tensor), dense(other[name]))[1]
            for a, b in zip(got, want, strict=True)
            for mine, other in ((a.gradients, b.gradients), (a.parameters, b.parameters))
            for name, tensor in mine.items()
        ),
        default=0.0,
    )
