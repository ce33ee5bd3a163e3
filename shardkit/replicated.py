"""Optimizers whose update couples all parameters (LBFGS), which can't be split by owner.

Every rank then runs the whole optimizer on all parameters with the same gradients and the same loss, so that all
ranks take the same decisions and end with the same parameters. State is not sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from .backend import Group, ReduceOp


def is_coupled(optim: Any) -> bool:
    """Whether one parameter's update depends on the others'."""
    return isinstance(optim, type) and issubclass(optim, LBFGS)


def step_on_every_rank(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    owner: dict[nn.Parameter, int],
    group: Group,
    kwargs: dict[str, Any],
) -> Any:
    """Steps with gradients brought from their owners and the mean loss of all ranks."""
    if closure is None:
        _share_gradients(owner, group)
        return optimizer.step(**kwargs)

    def same_everywhere() -> Any:
        with torch.enable_grad():
            loss = closure()
        _share_gradients(owner, group)
        if isinstance(loss, torch.Tensor):
            mean = loss.detach().clone()
            group.channel("parameters").all_reduce(mean, op=ReduceOp.AVG, label="loss of the closure")
            return mean
        return loss

    return optimizer.step(same_everywhere, **kwargs)


def _share_gradients(owner: dict[nn.Parameter, int], group: Group) -> None:
    """Gives every rank the owner's gradient of each parameter."""
    channel = group.channel("parameters")
    present = channel.all_gather_object([p.grad is not None for p in owner], label="which gradients exist")
    for i, (p, rank) in enumerate(owner.items()):
        if not present[rank][i]:
            p.grad = None
            continue
        if p.grad is None:
            p.grad = torch.empty_like(p)
        channel.broadcast(p.grad, rank, label="gradient from its owner")
