"""What a run saw, step by step, and where two runs part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .comparing import Difference, Tolerance, check_named, check_numbers, largest_gap

Tensors = dict[str, torch.Tensor]


@dataclass
class Moment:
    """One step of a run, under the plain model's names.

    Attributes:
        losses: each rank's loss.
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
        what: "loss of rank 1", "gradient of 0.weight", "value of 0.weight", "buffer ...".
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
    """Where ``got`` first leaves ``want``; None if it doesn't.

    Within a step: losses, then gradients, parameters and buffers, each in the model's order.
    """
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        try:
            for rank, (mine, other) in enumerate(zip(a.losses, b.losses, strict=True)):
                check_numbers(f"loss of rank {rank}", [mine], [other], tolerance)
            for what in ("gradient", "value", "buffer"):
                check_named(what, _named(a, what), _named(b, what), tolerance)
        except Difference as difference:
            return Parting(step, difference.where, difference.gap, str(difference))
    return None


def largest_difference(got: Sequence[Moment], want: Sequence[Moment]) -> float:
    """Largest absolute difference of any gradient or parameter in two runs with the same names and shapes."""
    return max(
        (
            largest_gap(tensor, other[name])
            for a, b in zip(got, want, strict=True)
            for mine, other in ((a.gradients, b.gradients), (a.parameters, b.parameters))
            for name, tensor in mine.items()
        ),
        default=0.0,
    )


def _named(moment: Moment, what: str) -> Mapping[str, torch.Tensor | None]:
    return {"gradient": moment.gradients, "value": moment.parameters, "buffer": moment.buffers}[what]
