"""What stands as the ``grad`` of a parameter whose gradient was reduced into a flat segment.

Reduced gradients of segments lie in ``FlatSegment.own.grad`` (see [Note: gradients of segments]), and one
parameter of each segment carries a tensor in their place. torch's own clipping and loss scaling, which go through
``parameters()``, meet that tensor, and through it the segment on all ranks; all else that would read it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...backend import Group, ReduceOp
from ...errors import ConfigurationError
from ...reduction.norms import global_norm, local_norm, order_of
from ...torch_seams.marked_tensors import MarkedTensor, as_plain
from ...torch_seams.tensor_facts import ALIKE, FACTS, SHAPE, name_of
from ...types import AnyCallable, Args, Kwargs, Memo, Tree

_NORMS = frozenset({torch.norm, torch.linalg.vector_norm})
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_CLEARING = frozenset({"zero_", "_foreach_zero_", "detach_", "__repr__", "__format__"})


class Segment(Protocol):
    """Where the gradients are: ``own.grad``, [S], another part of them on each rank of the group."""

    own: torch.nn.Parameter
    group: Group


class SegmentGradient(MarkedTensor):
    """Zeros of the shape of a parameter, [*], that answer for the gradient of a whole segment; see the module."""

    segment: Segment

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs, what = kwargs or {}, name_of(func)
        with as_plain():
            if what in FACTS or what in SHAPE or what in ALIKE or what in _CLEARING:
                return func(*args, **kwargs)
            if what == "detach":
                return args[0]
            if func in _NORMS:
                return _norm(args[0], order_of(*args[1:], **kwargs))
            if func is torch._foreach_norm:
                return tuple(_norm(g, order_of(*args[1:], **kwargs)) for g in args[0])
            if what == "mul_":
                _gradient_of(args[0]).mul_(args[1])
                return args[0]
            if func is torch._foreach_mul_:
                return torch._foreach_mul_([_gradient_of(g) for g in args[0]], *args[1:])
            if func is _UNSCALE:
                return _unscale(*args)
        raise ConfigurationError(
            f"{what} needs the gradients of parameters, which on this device lie reduced in flat segments, a part on "
            "each rank; clip with OSS.clip_grad_norm, scale with ShardedGradScaler, and read gradients in hooks of "
            "the parameters, or with ShardedDDP.no_sync() before they are reduced"
        )

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        with as_plain():
            copied = memo[id(self)] = torch.zeros_like(self.as_subclass(torch.Tensor))
        return copied


def stand_in(param: torch.Tensor, segment: Segment) -> torch.Tensor:
    """A tensor that stands for the segment's gradients as the ``grad`` of one of its parameters."""
    mark = torch.zeros_like(param).as_subclass(SegmentGradient)
    mark.segment = segment
    return mark


def _gradient_of(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, SegmentGradient):
        return gradient
    held = gradient.segment.own.grad
    return torch.zeros_like(gradient.segment.own) if held is None else held


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of a segment's gradients over all ranks (collective), 0-dim; of another gradient its own."""
    if not isinstance(gradient, SegmentGradient):
        return torch.linalg.vector_norm(gradient, order)
    if order <= 0:
        raise ConfigurationError(
            f"a norm of order {order} is changed by zeros, which pad segments; take one above 0"
        )
    held = _gradient_of(gradient)
    local = local_norm([held], order, torch.zeros((), dtype=held.dtype, device=held.device))
    return global_norm(local, order, gradient.segment.group, "norm of gradients, for torch.nn.utils")


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """As torch's, over all ranks (collective)."""
    _UNSCALE([_gradient_of(g) for g in gradients], found_inf, inv_scale)
    groups = {g.segment.group for g in gradients if isinstance(g, SegmentGradient)}
    for group in sorted(groups, key=lambda g: g.ranks):
        label = "whether a gradient overflowed, for torch.amp.GradScaler"
        group.channel("control").all_reduce(found_inf, op=ReduceOp.MAX, label=label).wait()
