"""fairscale.internal.params: norms of gradients, copies to devices, ranks of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist

from shardkit.compat.redirected import redirected_names
from shardkit.reduction.norms import local_norm
from shardkit.types import AnyCallable

__getattr__ = redirected_names(__name__)


@dataclasses.dataclass
class Workhandle:
    """A collective in flight and what to call when it is done."""

    handle: object
    callback: AnyCallable | None = None


def get_global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """Returns the global rank of a group's rank; None stands for all ranks."""
    if group is None or group is dist.group.WORLD:
        return rank
    return dist.get_global_rank(group, rank)


def calc_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of the gradients of parameters as one vector, [], computed in fp32 at least (collective on no rank).

    Parameters without a gradient count as zero. Its dtype is that of the first parameter with one.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [x.grad.detach() for x in parameters if x.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    first = gradients[0]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return local_norm(wide, float(p), wide[0].new_zeros(())).to(first)
