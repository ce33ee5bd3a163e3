"""Which gradients count for the norm below an FSDP root, and where the others of the same flat parameters are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..backend import Group
from ..errors import ConfigurationError
from ..reduction.norms import Portion, clip_by_global_norm, norm_like
from .flat_param import FlatParam
from .state import ShardingState


def clip(root: ShardingState, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales the gradients below a root; returns their norm over all ranks.

    Raises:
        ConfigurationError: ``norm_type`` is 0.
    """
    if norm_type == 0:
        raise ConfigurationError(
            "norm_type=0 counts parameters whose gradients are not zero, and shards are no parameters; "
            "clip_grad_norm_ takes any other number, inf and -inf"
        )
    flats = root.all_flats()
    sharded = {listing.param for flat in flats for listing in flat.listings}
    rest = [p for p in root.door.parameters() if p not in sharded]
    everything = [f.param for f in flats] + rest
    if not everything:
        return torch.zeros(())
    by_group: dict[tuple[int, ...], tuple[Group, list[torch.Tensor]]] = {}
    gradients = [p.grad for p in rest if p.grad is not None]
    alike = gradients.copy()
    for flat in flats:
        own = _gradients_of(flat)
        gradients += own
        by_group.setdefault(flat.group.ranks, (flat.group, []))[1].extend(_that_count(flat, own, norm_type))
    portions = [Portion(counted, (group,)) for group, counted in by_group.values()]
    if alike:
        portions.append(Portion(alike, ()))
    return clip_by_global_norm(portions, gradients, _like(root, everything), max_norm, norm_type)


def _like(root: ShardingState, params: Sequence[torch.Tensor]) -> torch.Tensor:
    like = norm_like(params)
    on_host = like.device.type == "cpu" and not root.options.offload.parameters
    return like.to(root.group.backend.device()) if on_host else like


def _gradients_of(flat: FlatParam) -> list[torch.Tensor]:
    """This rank's gradients, without padding that nobody lists or clears."""
    if flat.shards is not None:
        return flat.shards.local_gradients()
    return [] if flat.param.grad is None else [flat.param.grad]


def _that_count(flat: FlatParam, gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Those of them that the norm is of; for norms that zeros change, without padding and what is unused."""
    if flat.shards is not None and flat.shards.has_copies:
        return flat.shards.local_gradients(padded=norm_type > 0, copies=False)
    if norm_type > 0 or not gradients:
        return gradients
    if flat.shards is not None:
        return flat.shards.local_gradients(padded=False)
    (gradient,) = gradients
    if flat.unused.used is not None:
        return [torch.where(flat.unused.used, gradient, torch.full_like(gradient, math.inf))]
    rank, unused = flat.group.rank, flat.unused.originals
    here = [p for p in flat.layout.pieces() if p.rank == rank and not unused[p.item]]
    return [gradient.view(-1)[p.offset : p.offset + p.numel] for p in here]
