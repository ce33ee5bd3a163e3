"""Moving averages of what steps measure, by param group, as the wrapped optimizer's state holds them.

Legend: G param groups of an optimizer.
"""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from ..types import StateDict

State = dict[str, torch.Tensor]

SQUARE, VARIANCE = "grad_sqr_avg", "grad_var_avg"
KEY = "adascale"  # in the optimizer's state


def initial_state(groups: int) -> State:
    """Averages before the first step: every gain is 1."""
    return {
        SQUARE: torch.ones(groups, dtype=torch.float64),
        VARIANCE: torch.zeros(groups, dtype=torch.float64),
    }


def add_groups(state: State, count: int) -> None:
    """Extends the averages by groups that have not been measured yet."""
    before = state[SQUARE].numel()
    for name, values in list(state.items()):
        if name.endswith("_count") and values.numel() == 1:
            values = values.expand(before)  # until now all groups had the same
        state[name] = torch.cat([values, torch.full((count,), float(name == SQUARE), dtype=values.dtype)])


def rescale_variance(state: State, factor: float) -> None:
    """Multiplies all that the average of the variance is made of."""
    for name in (VARIANCE, f"{VARIANCE}_biased", f"{VARIANCE}_total"):
        if name in state:
            state[name] = state[name] * factor


def update_average(state: State, name: str, value: torch.Tensor, smoothing: float, debias: bool) -> None:
    """Takes a step's estimate [G] into the moving average ``state[name]``.

    Args:
        smoothing: weight of the past.
        debias: divide by the sum of the weights; else the mean of all steps while these are fewer than
            1 / (1 - smoothing), after that the plain moving average (appendix B.3).
    """
    zeros = torch.zeros_like(value)
    if debias:
        biased = smoothing * state.get(f"{name}_biased", zeros) + (1.0 - smoothing) * value
        weights = smoothing * state.get(f"{name}_unbias", zeros) + (1.0 - smoothing)
        state.update({f"{name}_biased": biased, f"{name}_unbias": weights, name: biased / weights})
        return
    # one count for all groups where none was added later: that is the format fairscale knows
    count = state.get(f"{name}_count", zeros[:1]) + 1
    is_early = count * (1.0 - smoothing) < 1.0
    total = state.get(f"{name}_total", zeros) + torch.where(is_early, value, zeros)
    later = smoothing * state[name] + (1.0 - smoothing) * value
    state.update({f"{name}_count": count, name: torch.where(is_early, total / count, later)})
    if bool(is_early.any()):
        state[f"{name}_total"] = total


def loaded(data: StateDict, groups: int) -> State:
    """Own copies of the averages in an optimizer's state dict; new ones where it has none.

    Args:
        data: of this class (tensors), of fairscale's (numpy arrays), or of an optimizer without AdaScale.
        groups: G.

    Raises:
        ConfigurationError: they are of another number of groups.
    """
    saved = data["state"].get(KEY)
    if saved is None:
        return initial_state(groups)
    averages = {k: torch.tensor([float(x) for x in v], dtype=torch.float64) for k, v in saved.items()}
    found = averages[SQUARE].numel()
    if found != groups:
        raise ConfigurationError(
            f"the state dict has AdaScale's averages of {found} param groups, this optimizer has {groups}; "
            "build it with the same groups first"
        )
    for name, values in averages.items():
        if values.numel() != groups and not (name.endswith("_count") and values.numel() == 1):
            raise ConfigurationError(
                f"AdaScale's {name!r} has {values.numel()} values, expected one for each of {groups} groups; the "
                " state dict was damaged, or put together by hand"
            )
    return averages
