"""Norms of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .backend import Group, ReduceOp


def dense(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients as dense tensors; of sparse ones the values (after summing what stands twice)."""
    return [g.coalesce()._values() if g.is_sparse else g for g in gradients]


def local_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    like: torch.Tensor,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Norm of this rank's gradients seen as one vector; 0-dim, 0 where there are none.

    Device and dtype are those of ``like``: they have to be the same on all ranks, whatever gradients these hold.
    """
    if not gradients:
        return torch.zeros_like(like)
    norm = torch.nn.utils.get_total_norm(dense(gradients), norm_type, foreach=foreach)
    return norm.to(device=like.device, dtype=like.dtype)


def norm_like(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 0-dim tensor with the device of the parameters and the widest of their dtypes, fp32 at least."""
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, p.dtype)
    return torch.zeros((), dtype=dtype, device=params[0].device)


def global_norm(local: torch.Tensor, norm_type: float, group: Group) -> torch.Tensor:
    """Norm over all ranks of the group from each rank's :func:`local_norm`; every rank calls it."""
    if group.world_size == 1:
        return local
    if math.isinf(norm_type):
        total, op = local.clone(), ReduceOp.MAX if norm_type > 0 else ReduceOp.MIN
        group.channel("control").all_reduce(total, op=op, label="norm of gradients")
        return total
    total = local.pow(norm_type)
    group.channel("control").all_reduce(total, label="norm of gradients")
    return total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_by_global_norm(
    counted: Sequence[torch.Tensor],
    clipped: Sequence[torch.Tensor],
    group: Group,
    like: torch.Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Scales ``clipped`` so that the norm of ``counted`` over all ranks is at most ``max_norm``; returns that norm."""
    total = global_norm(local_norm(counted, norm_type, like, foreach), norm_type, group)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it can't be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    # no branch on the value: it would wait for the device
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    tensors = [g._values() if g.is_sparse else g for g in clipped]
    by_device_and_dtype: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for g in tensors:
        by_device_and_dtype.setdefault((g.device, g.dtype), []).append(g)
    for (where, _), same in by_device_and_dtype.items():
        torch._foreach_mul_(same, coefficient.to(where))
    return total
