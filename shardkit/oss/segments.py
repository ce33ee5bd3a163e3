"""Flat segments: how an optimizer works on whole owned parameters where all ranks run one compiled graph.

Legend: W world size, S numel of one rank's segment.

[Note: flat segments] Where execution is lazy and compiled (``even_shards_only``), every rank has to record the
same operations on the same shapes, though ranks own different parameters. There the optimizer of a
rank works on one flat tensor [S] per group and dtype that holds its segment, padded to the same size
everywhere; element-wise optimizers can't tell the difference. Which segment is "mine" enters the graph as
data (an index), never as a shape.

[Note: gradients of segments] The reduced gradient lives in ``own.grad``; parameters keep none after backward. The next
reduction adds to it, after a step too, until ``zero_grad`` of the optimizer or the wrapper is called. The module's own
``zero_grad`` is noticed as well: the smallest parameter carries a stand-in as its ``grad`` in between, which such a
call removes or writes to. Parameters that got no gradient (frozen, unused) share a segment with others that did: a
step puts their elements, and those of their state, back. torch's own clipping and loss scaling, which go through
``parameters()``, meet the stand-in, and through it the segment on all ranks; all else that would read it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter, or_

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Group, ReduceOp
from ..errors import ConfigurationError
from ..layout import SegmentLayout, segment_layout
from ..optimizer_state.kinds import UsedMask, counts_steps, wrong_count
from ..reduction import shard_gradients
from ..reduction.packing import JoinedPack, PackedForm
from ..reduction.shard_gradients import StandingGradient, agree_on_overflow, global_norm, local_norm, order_of
from ..torch_seams.tensors import ALIKE, FACTS, SHAPE, MarkedTensor, as_plain, name_of
from ..types import AnyCallable, Args, Kwargs, Memo, Tree

logger = logging.getLogger("shardkit")
Gradients = Mapping[nn.Parameter, torch.Tensor]
_version = attrgetter("_version")
_NORMS = frozenset({torch.norm, torch.linalg.vector_norm})
MASTER = "master"  # the key of masters in the state of their parameters
_CLEARING = frozenset({"zero_", "_foreach_zero_", "detach_", "__repr__", "__format__"})


def dtype_of_update(param: torch.Tensor) -> torch.dtype:
    """Returns the dtype that a parameter is updated in, which is also that of its state."""
    is_narrow = param.is_floating_point() and param.dtype.itemsize == 2
    return torch.float32 if is_narrow else param.dtype


class FlatSegment:
    """One param group's parameters of one dtype, whose owned segment is a flat tensor of equal size on all ranks.

    Attributes:
        own: the tensor that this rank's optimizer updates, [S], in the dtype of the parameters or another one.
        param_group: index of the group that the parameters are in.
        params, owners: the parameters, and the rank of each.
        has_parts: each rank has a part of every parameter, whoever owns it.
        has_masters: ``own`` is in fp32, and state of parameters of 16 bits.
    """

    has_parts = False

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        owners: Sequence[int],
        group: Group,
        param_group: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.params = list(params)
        self.param_group = param_group
        self.owners = list(owners)
        self.group = group
        self.layout = self._laid_out()
        self._form = PackedForm(self.layout.pieces, self.layout.sizes, even=True)
        self._pack = JoinedPack(self._form, [p.numel() for p in self.params])
        self._mine: torch.Tensor | None = None  # which segment is this rank's, [1]
        with torch.no_grad():
            own = self.take_own([p.detach() for p in self.params])
        if dtype is not None and not self.has_parts:
            dtype = dtype_of_update(own)
        self.own = nn.Parameter(own.to(dtype or own.dtype), requires_grad=True)
        self.has_masters = self.own.dtype != own.dtype and not self.has_parts
        self._flags: torch.Tensor | None = None  # [F]; None while every parameter has a gradient
        self._there: list[bool] = []  # which parameters have a gradient of this rank for the next step
        self._left_out: set[int] | None = set()  # which had none in some step; None once that was warned of
        self.marked = min(self.params, key=lambda p: p.numel())
        self._standing = StandingGradient()
        self._versions = sum(map(_version, self.params))

    # ------------------------------------------------------------ gradients
    @torch.no_grad()
    def reduce_gradients(
        self, channel: Group, wire_dtype: torch.dtype | None, instead: Gradients | None = None
    ) -> None:
        """Averages the parameters' gradients over ranks into ``own.grad``, added to what waits there already.

        Args:
            wire_dtype: in which they travel; None for their own.
            instead: gradients of the parameters, in place of those that they show.
        """
        self.notice_clearing()
        gradients = [p.grad if instead is None else instead.get(p) for p in self.params]
        there = [g is not None for g in gradients]
        packed = self.pack(gradients, there, None if instead is None else self.own)
        if wire_dtype is not None:
            packed = packed.to(wire_dtype)
        size = self.own.numel()
        mine = packed.new_empty(self._form.sizes[self.group.rank])
        channel.reduce_scatter_into(mine, packed, op=ReduceOp.AVG, label="gradients")
        mine = mine.to(self.own.dtype)
        self._keep(mine[:size], there, None if all(there) else mine[size:], add=True)

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Picks this rank's segment of gradients that are the same on every rank, where parameters have any."""
        mark = self._standing.gradient
        gradients = [None if p.grad is mark else p.grad for p in self.params]
        there = [g is not None for g in gradients]
        if not any(there):
            if mark is not None and self.marked.grad is None:
                self.clear_gradient()
            return
        flags = None if all(there) else self._pack.flags(there, self.own)[self.group.rank]
        self._keep(self.take_own(gradients).to(self.own.dtype), there, flags, add=False)

    def _keep(self, gradient: torch.Tensor, there: list[bool], flags: torch.Tensor | None, add: bool) -> None:
        if add and self.own.grad is not None:
            gradient = gradient + self.own.grad
            flags = None if flags is None or self._flags is None else flags + self._flags
            there = list(map(or_, there, self._there))
        self.own.grad, self._there = gradient, there
        self._flags = flags
        for p in self.params:
            p.grad = None
        mark = torch.zeros_like(self.marked).as_subclass(SegmentGradient)
        mark.segment = self
        self._standing.stand(self.marked, mark)

    def notice_clearing(self, _: torch.Tensor | None = None) -> None:
        """Looks, before new gradients, whether the module's zero_grad was called since the last reduction."""
        if (mark := self._standing.gradient) is None:
            return
        if self._standing.was_touched(self.marked):
            self.clear_gradient()
        if self.marked.grad is mark:
            self.marked.grad = None
        self._standing.forget()

    def clear_gradient(self) -> None:
        """Clears it as the stand-in was: to zeros, which step what moves without a gradient, or to none."""
        is_there = self._standing.gradient is not None and self.marked.grad is self._standing.gradient
        self.own.grad = torch.zeros_like(self.own) if is_there and self.own.grad is not None else None
        self._flags = self._flags if is_there else None

    def check_counts(self, optimizer: Optimizer) -> None:
        """Warns, once, of a parameter that the next step counts with the others; see [Note: counts] in ``kinds.py``."""
        if self.own.grad is None or self._left_out is None:
            return
        again = [k for k in sorted(self._left_out) if self._there[k]]
        self._left_out.update(k for k, is_there in enumerate(self._there) if not is_there)
        if again and counts_steps(optimizer):
            what = f"a parameter of shape {tuple(self.params[again[0]].shape)} in group {self.param_group}"
            remedy = "Give what sits out a param group of its own"
            logger.warning(wrong_count(optimizer, self.group, what, "flat segment", remedy))
            self._left_out = None

    def used(self) -> UsedMask | None:
        """Elements of ``own`` whose parameters got a gradient on any rank, [S]; None if all did."""
        if self._flags is None:
            return None
        return UsedMask(self._pack.used_elements(self._flags, self.group.rank))

    # ------------------------------------------------------------ layout
    def _laid_out(self) -> SegmentLayout:
        numels = [p.numel() for p in self.params]
        return segment_layout(numels, self.owners, self.group.world_size, even=True)

    def pack(
        self,
        tensors: Sequence[torch.Tensor | None],
        had: list[bool] | None = None,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Lays out per-parameter tensors (None: zeros) by owner with padding, [W * S] or, with flags, [W * (S + F)].

        Args:
            tensors: of the parameters' shapes.
            had: which of them there are; None for no flags.
            like: has the dtype of the result; by default the parameters have.
        """
        return self._pack.join(tensors, had, self.params[0] if like is None else like)

    def take_own(
        self, tensors: Sequence[torch.Tensor | None], like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns this rank's segment [S] of per-parameter tensors that every rank holds; see :meth:`pack`."""
        # the rank is data, so that the graph is the same on all ranks
        device = self.params[0].device
        if self._mine is None or self._mine.device != device:  # a transfer: once
            self._mine = torch.tensor([self.group.rank], device="cpu").to(device)
        rows = self.pack(tensors, None, like).view(self.group.world_size, -1)
        return rows.index_select(0, self._mine).view(-1)

    @torch.no_grad()
    def take_values(self, if_written: bool = False) -> None:
        """Lets the optimizer go on from values that somebody else has given to parameters.

        Args:
            if_written: only where somebody wrote to them since their values and the segment's were the same.
        """
        if if_written and sum(map(_version, self.params)) == self._versions:
            return
        values = self.take_own([p.detach() for p in self.params], self.own)
        dtype = self.params[0].dtype
        if dtype != self.own.dtype:  # what the parameters' values are rounded from stays
            values = torch.where(values.to(dtype) == self.own.to(dtype), self.own, values)
        self.own.copy_(values)
        self._versions = sum(map(_version, self.params))

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a buffer laid out by owner [W * S] as per-parameter tensors, in parameter order."""
        found = self._pack.split(flat)
        return [
            t if p.dim() == 1 else torch.ops.aten.view_copy(t, p.shape)
            for t, p in zip(found, self.params, strict=True)
        ]

    def split_own(self, segment: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Returns this rank's segment [S] as one tensor per owned parameter."""
        here = (p for p in self._form.pieces if p.rank == self.group.rank)
        return {
            self.params[p.item]: segment[p.offset : p.offset + p.numel].view(self.params[p.item].shape)
            for p in here
        }

    def join_own(self, pieces: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """Reverses :meth:`split_own`: returns this rank's segment [S], padded with zeros."""
        flat = [pieces[self.params[i]].reshape(-1) for i in self.layout.items_of(self.group.rank)]
        filled = sum(f.numel() for f in flat)
        like = flat[0] if flat else self.own.detach()
        padding = like.new_zeros(self.layout.sizes[self.group.rank] - filled)
        return torch.cat([*flat, padding]).to(self.own.device)

    @torch.no_grad()
    def publish(self, wire_dtype: torch.dtype | None) -> None:
        """Gathers every owner's segment and hands the parameters their new values."""
        own = self.own.detach()
        is_wider = own.dtype != self.params[0].dtype  # and is not rounded
        if wire_dtype is not None and own.dtype == torch.float32:
            own = own.to(wire_dtype)
        elif is_wider:
            own = own.to(self.params[0].dtype)
        if self.group.world_size == 1:
            full = own
        else:
            full = own.new_empty(self.layout.numel)
            self.group.all_gather_into(full, own, label="updated parameters")
        for p, value in zip(self.params, self.split(full), strict=True):
            p.copy_(value)  # in place, so that the program may write over the old value
        if own.dtype != self.own.dtype and not is_wider:
            self.own.copy_(own)
        self._versions = sum(map(_version, self.params))


# ------------------------------------------------------------ what stands for their gradients


class SegmentGradient(MarkedTensor):
    """Zeros of the shape of a parameter, [*], that answer for the gradient of a whole segment; see the module."""

    segment: FlatSegment

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
            if what == "_amp_foreach_non_finite_check_and_unscale_":
                shard_gradients.unscale(map(_gradient_of, args[0]), args[2], args[1])
                groups = {g.segment.group for g in args[0] if isinstance(g, SegmentGradient)}
                return agree_on_overflow(groups, args[1])
        raise ConfigurationError(
            f"{what} needs the gradients of parameters, which on this device lie reduced in flat segments, a part on "
            "each rank; clip with OSS.clip_grad_norm, scale with ShardedGradScaler, and read gradients in hooks of "
            "the parameters, or with ShardedDDP.no_sync() before they are reduced"
        )

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        with as_plain():
            copied = memo[id(self)] = torch.zeros_like(self.as_subclass(torch.Tensor))
        return copied


def _gradient_of(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, SegmentGradient):
        return gradient
    held = gradient.segment.own.grad
    return torch.zeros_like(gradient.segment.own) if held is None else held


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """Returns the norm of a segment's gradients over all ranks (collective), 0-dim; of another gradient its own."""
    if not isinstance(gradient, SegmentGradient):
        return torch.linalg.vector_norm(gradient, order)
    if order <= 0:
        raise ConfigurationError(
            f"a norm of order {order} is changed by zeros, which pad segments; take one above 0"
        )
    held = _gradient_of(gradient)
    local = local_norm([held], order, torch.zeros((), dtype=held.dtype, device=held.device))
    return global_norm(local, order, gradient.segment.group, "norm of gradients, for torch.nn.utils")
