"""The norm of gradients whose parts lie on many ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..backend import Group, ReduceOp
from ..norms import local_norm, norm_like

if TYPE_CHECKING:
    from .wrapper import FSDP


def clip(root: FSDP, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales the gradients below a root; returns their norm over all ranks."""
    from .wrapper import FSDP

    by_group: dict[tuple[int, ...], tuple[Group, list[nn.Parameter]]] = {}
    sharded = set()
    for w in root.modules():
        if isinstance(w, FSDP):
            for flat in w._flats:
                key = flat.group.ranks
                by_group.setdefault(key, (flat.group, []))[1].append(flat.param)
                sharded.add(flat.param)
    rest = [p for p in root.parameters() if p not in sharded]
    everything = [p for _, params in by_group.values() for p in params] + rest
    if not everything:
        return torch.zeros(())
    like = norm_like(everything)
    like = like.to(
        root._group.backend.device()
        if like.device.type == "cpu" and not root._offload.parameters
        else like.device
    )
    total = _norm([p.grad for p in rest if p.grad is not None], norm_type, like)
    for group, params in by_group.values():
        part = _norm([p.grad for p in params if p.grad is not None], norm_type, like)
        if group.world_size > 1:
            op = ReduceOp.MAX if math.isinf(norm_type) else ReduceOp.SUM
            group.channel("control").all_reduce(part, op=op, label="norm of gradients").wait()
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    if not math.isinf(norm_type):
        total = total.pow(1.0 / norm_type)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in everything:
        if p.grad is not None:
            p.grad.mul_(coefficient.to(device=p.grad.device, dtype=p.grad.dtype))
    return total


def _norm(gradients: list[torch.Tensor], norm_type: float, like: torch.Tensor) -> torch.Tensor:
    """Sum of powers of this rank's gradients, or their maximum; 0-dim."""
    gradients = [g for g in gradients if g.numel()]
    norm = local_norm(gradients, norm_type, like)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)
