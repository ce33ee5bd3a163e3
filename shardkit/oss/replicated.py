"""Optimizers that can't be split by owner: every rank runs the whole update with the same gradients.

LBFGS couples all parameters. Where ranks have to run one compiled graph (``even_shards_only``), an optimizer works on
flat segments, so there everything that is not known to be element-wise runs whole as well. State is then not
sharded; results are those of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from ..backend import Group, ReduceOp
from ..optimizers.elementwise import is_known_elementwise

logger = logging.getLogger("shardkit")


def has_to_run_whole(optimizer_class: Any, even_shards_only: bool) -> bool:
    """Whether every rank has to run this optimizer on all parameters."""
    plain = getattr(optimizer_class, "func", optimizer_class)  # functools.partial
    if isinstance(plain, type) and issubclass(plain, optim.LBFGS):
        return True
    if even_shards_only and not is_known_elementwise(plain):
        logger.warning(
            "%s is not known to be element-wise, so each rank runs it on all parameters and its state is not sharded",
            getattr(plain, "__name__", plain),
        )
        return True
    return False


def step_whole(
    optimizer: Optimizer, closure: Callable[[], Any] | None, group: Group, kwargs: dict[str, Any]
) -> Any:
    """Steps with the mean of all ranks' losses, so that all ranks take the same decisions."""
    if closure is None:
        return optimizer.step(**kwargs)

    def mean_loss() -> Any:
        loss = closure()
        if not isinstance(loss, torch.Tensor):
            return loss
        mean = loss.detach().clone()
        group.channel("parameters").all_reduce(mean, op=ReduceOp.AVG, label="loss of the closure")
        return mean

    return optimizer.step(mean_loss, **kwargs)
