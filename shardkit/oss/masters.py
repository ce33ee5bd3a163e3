"""Masters in fp32 of weights of 16 bits, which an optimizer of any class keeps as state.

While it steps, a parameter's data is its master, [*] in fp32, and its gradient is cast: the class meets parameters of
fp32 and makes its other state as for these. In between, the master is an entry of the parameter's state, so that it is
saved, cut and loaded as all state is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..types import StateDict, Tree
from . import state as oss_state
from .placement import MASTER, dtype_of_update


def with_masters(optim: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Returns what makes optimizers that update masters and round the parameters from them.

    Args:
        optim: a class of optimizers, or ``functools.partial`` of one.

    Raises:
        ConfigurationError: no class can be derived of it.
    """
    if isinstance(optim, functools.partial):
        return functools.partial(with_masters(optim.func), *optim.args, **optim.keywords)
    if not isinstance(optim, type):
        raise ConfigurationError(
            f"masters=True takes a class of optimizers, or functools.partial of one; optim is {optim!r}"
        )
    return cast("type[Optimizer]", type(optim.__name__, (_WithMasters, optim), {"updates": optim}))


class _WithMasters(Optimizer):
    """Lets parameters be their masters while the class that it ``updates`` with takes a step."""

    updates: type[Optimizer]

    def step(self, closure: Callable[[], Tree] | None = None, **kwargs: object) -> Tree:  # type: ignore[override]
        """Takes a step; the closure sees the parameters as they are in between."""
        update: Tree = self.updates.step
        if getattr(update, "hooked", False):  # by torch: hooks have run around this one
            update = update.__wrapped__
        with contextlib.ExitStack() as hidden:

            def evaluated() -> Tree:
                hidden.close()  # a program knows the weights as they are rounded
                try:
                    return program()
                finally:
                    hidden.enter_context(_hiding_weights(self))

            if closure is not None:
                program, kwargs["closure"] = closure, evaluated
            hidden.enter_context(_hiding_weights(self))
            return update(self, **kwargs)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads as torch does, and in the dtype of the masters what torch rounds to that of the parameters."""
        super().load_state_dict(state_dict)
        cast("Tree", self.state).update(oss_state.as_loaded(self, state_dict, dtype_of_update))


@contextlib.contextmanager
def _hiding_weights(optimizer: Optimizer) -> Iterator[None]:
    """Gives parameters that have a gradient their masters' values, and gradients their dtype; rounds at the end."""
    state: Tree = optimizer.state
    hidden: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    try:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            dtype, data, gradient = dtype_of_update(p), p.data, p.grad
            if gradient is None or dtype == p.dtype:
                continue
            own, written, wide = state.get(p, {}), data.to(dtype), gradient.to(dtype)
            before = own.get(MASTER, written)
            # what a program has written to the weights since they were rounded counts
            master = torch.where(before.to(data.dtype) == data, before, written)
            hidden.append((p, data, gradient))
            own.pop(MASTER, None)  # classes make their state where there is none
            p.grad, p.data = None, master
            p.grad = wide
        yield
    finally:
        for p, data, gradient in hidden:
            state[p][MASTER] = p.data
            p.grad, p.data = None, data.copy_(p.data)
            p.grad = gradient
