"""Refuses optimizer state that is of other parameters, before any of it is taken.

``torch.optim.Optimizer.load_state_dict`` takes any shapes; a state of another model then fails in the middle of a step,
or is broadcast.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from ..errors import ConfigurationError
from ..types import SavedState

# What torch's optimizers keep as one number for a parameter, were the parameter one number itself.
NUMBERS = ("step", "mu", "eta", "mu_product")


def is_shaped_like(value: object, param: torch.Tensor) -> bool:
    """Whether a state is a tensor of the parameter's shape, and no number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def check_state(
    states: Iterable[tuple[str, torch.Size, SavedState]],
    own: Iterable[SavedState] | None,
    is_elementwise: bool,
) -> None:
    """Compares the shapes of saved state with those of parameters.

    Args:
        states: of each parameter its name, its shape, and its saved state.
        own: the state that the optimizer has of each, in the same order; None for none.
        is_elementwise: whether each tensor of state but :data:`NUMBERS` has one element for each of the parameter's.

    Raises:
        ConfigurationError: a shape differs from the parameter's, or from that of the state that is to be replaced.
    """
    mine_of = iter(own) if own is not None else itertools.repeat({})
    for (name, shape, saved), mine in zip(states, mine_of, strict=False):
        for key, value in saved.items():
            if not isinstance(value, torch.Tensor):
                continue
            known = mine.get(key)
            expected: torch.Size | None = None
            if isinstance(known, torch.Tensor):
                expected = known.shape
            elif is_elementwise and key not in NUMBERS:
                expected = shape
            if (
                expected is not None
                and value.shape != expected
                and not (value.numel() == expected.numel() == 1)
            ):
                raise ConfigurationError(
                    f"optimizer state {key!r} of parameter {name} has shape {tuple(value.shape)}, expected "
                    f"{tuple(expected)}; nothing was loaded. This state is of another model, or its parameters were in "
                    "another order: build model and param groups as they were when it was saved"
                )
