"""Norms of gradients that are spread over ranks, and clipping by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..backend import Group, ReduceOp
from ..errors import ConfigurationError, LifecycleError
from ..torch_seams.dtensors import local_of
from ..torch_seams.tensor_facts import alike
from ..tracing import ranges
from ..tracing.ranges import CLIP
from .ordered import exact_norm


class Portion(NamedTuple):
    """Gradients that lie on several ranks, each on one of them.

    Attributes:
        groups: where the others are; none: every rank has these same ones. Several: what the ranks of the first have
            together is one part of what those of the second have together, and so on.
    """

    gradients: list[torch.Tensor]
    groups: Sequence[Group]


# Groups whose ranks may have come through different numbers of a step's micro-batches: one for each open block of
# shardkit.uneven. What ranks tell each other there goes over the channel that norms take.
in_parts: list[Group] = []


def check_whole(groups: Iterable[Group]) -> None:
    """Raises LifecycleError where gradients are those of some micro-batches, and ranks don't meet over them."""
    for group, open_one in itertools.product(groups, in_parts):
        is_this_rank = group.ranks[group.rank] == open_one.ranks[open_one.rank]  # ranks may be threads
        if is_this_rank and len({*group.ranks} & {*open_one.ranks}) > 1:
            raise asked_in_parts()


def asked_in_parts() -> LifecycleError:
    """Says what is not possible before all micro-batches are through."""
    return LifecycleError(
        "a norm or an overflow of gradients was asked for inside of uneven(), where they are those of some "
        "micro-batches. Unscale, clip and step after the block, where gradients are those of all micro-batches"
    )


def dense(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns gradients as dense tensors; of sparse ones the values (after summing what stands twice)."""
    return [g.coalesce()._values() if g.is_sparse else g for g in gradients]


def is_exact(norm_type: float) -> bool:
    """Says whether a norm whose bits don't depend on ranks is :func:`exact_norm`'s; the largest number is always such.

    Raises:
        ConfigurationError: there is none of this order.
    """
    if norm_type != 2.0 and not math.isinf(norm_type):
        raise ConfigurationError(
            f'a norm of order {norm_type:g} with order="fixed": of other orders than 2 and inf it is rounded as the '
            "shards are cut. Clip by one of these"
        )
    return norm_type == 2.0


def order_of(
    norm_type: float | str = 2.0, *, p: float | str | None = None, ord: float | None = None, **others: object
) -> float:
    """Returns the order of a norm from what a function of torch's was called with after the tensor."""
    return float(next(given for given in (p, ord, norm_type) if given is not None))


def nothing(norm_type: float) -> float:
    """Returns the norm of no gradients: what changes no other norm that it is combined with."""
    return math.inf if norm_type < 0 else 0.0


def local_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    like: torch.Tensor,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Returns the norm of this rank's gradients seen as one; 0-dim.

    Device and dtype are those of ``like``: they have to be the same on all ranks, whatever gradients these hold.
    """
    with torch._C.DisableTorchFunctionSubclass():  # gradients of shards answer torch with norms over ranks
        there = [g if type(g) is torch.Tensor else g.as_subclass(torch.Tensor) for g in dense(gradients)]
        there = [g for g in there if g.numel()]
        if not there:
            return torch.full_like(like, nothing(norm_type))
        norm = torch.nn.utils.get_total_norm(there, norm_type, foreach=foreach)
    return norm.to(device=like.device, dtype=like.dtype)


def norm_like(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Makes a 0-dim tensor with the device of the parameters and the widest of their dtypes, real and fp32 at least."""
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, p.dtype.to_real() if p.dtype.is_complex else p.dtype)
    return torch.zeros((), dtype=dtype, device=params[0].device)


def global_norm(local: torch.Tensor, norm_type: float, group: Group, label: str = "") -> torch.Tensor:
    """Returns the norm over all ranks of the group from each rank's :func:`local_norm`; every rank calls it."""
    if in_parts:
        check_whole((group,))
    if group.world_size == 1:
        return local
    # gradients are offloaded, and the library takes no host tensors
    if local.device.type != group.backend.device_type:
        return global_norm(local.to(group.backend.device()), norm_type, group, label).to(local.device)
    control, label = group.channel("control"), label or "norm of gradients"
    if math.isinf(norm_type):
        total, op = local.clone(), ReduceOp.MAX if norm_type > 0 else ReduceOp.MIN
        with CLIP.norm():
            control.all_reduce(total, op=op, label=label)
        return total
    total = local.clone() if norm_type == 0 else local.pow(norm_type)  # of order 0: how many are not zero
    with CLIP.norm():
        control.all_reduce(total, label=label)
    return total if norm_type == 0 else total.pow(1.0 / norm_type)


def combined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm of everything from those of its parts."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)


@torch.no_grad()
def clip_by_global_norm(
    portions: Sequence[Portion],
    clipped: Sequence[torch.Tensor],
    like: torch.Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """Scales ``clipped`` so that the norm of all ``portions`` is at most ``max_norm``; returns that norm (0-dim).

    Every rank calls it with portions of the same groups in the same order.
    """
    if in_parts:
        check_whole([group for portion in portions for group in portion.groups])
    with CLIP.clip():
        if in_order and is_exact(norm_type):
            total = exact_norm([(dense(map(local_of, each)), groups) for each, groups in portions], like)
        else:
            norms = []
            for gradients, groups in portions:
                norm = local_norm(gradients, norm_type, like, foreach)
                for group in groups:
                    norm = global_norm(norm, norm_type, group)
                norms.append(norm)
            total = combined(norms, norm_type)
    if ranges.listening:
        ranges.report_number("gradient_norm", total)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it can't be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    # no branch on the value: it would wait for the device
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    tensors = [g._values() if g.is_sparse else g for g in clipped]
    for same in alike(tensors):
        torch._foreach_mul_(same, coefficient.to(same[0].device))
    return total


def clip_params(
    params: Sequence[torch.Tensor], group: Group, max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Clips gradients of which each rank of a group has a part of its own; the norm is on ``device``."""
    gradients = [p.grad for p in params if p.grad is not None]
    like = norm_like(params).to(device)
    return clip_by_global_norm(
        [Portion(gradients, (group,))], gradients, like, float(max_norm), float(norm_type)
    )
