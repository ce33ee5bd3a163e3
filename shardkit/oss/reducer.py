"""Averages gradients to their owners while backward runs (ZeRO stage 2, arXiv 1910.02054).

Legend: W world size, N numel of a bucket, S numel of this rank's part of it.

[Note: buckets] Parameters are grouped in the order in which backward reaches them. When all gradients of a bucket
are there they are packed by owner in one operation, given back, and reduce-scattered; the owner's
gradients then are views of the result [S]. Buckets are sent in one fixed order on all ranks, so a
parameter that is unused on some ranks can't make them meet the wrong partner. One is in flight at a time, while
backward makes the gradients of the next: a second would cost memory and gains nothing where reducing is the
slower part.

[Note: which gradients exist] A plain process leaves ``grad=None`` where a parameter was not used, and the
optimizer then skips it. With each bucket travels one flag for each parameter ([Note: packed gradients]).

[Note: accumulating] ``param.grad`` of an owner holds either this rank's own unreduced gradient (after ``no_sync``) or
the mean over all ranks (after a reduction). Before a mean gets more added it is multiplied by W: then one
more reduction gives mean + mean. Nothing has to be stored beside ``param.grad``, so every way to clear, clip or
unscale gradients works. With a fixed order ([Note: fixed order] in ``reduction/ordered.py``) it is put aside instead,
and what comes is added to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..backend import Group, ReduceOp, Work
from ..errors import LifecycleError
from ..layout import alignment, buckets_by_size, rounded_up, segment_layout
from ..policy import ReducePolicy
from ..reduction.compression import BlockFormat, CompressedReduceScatter, format_for
from ..reduction.ordered import contributions, exchange, microbatches
from ..reduction.packing import PackedForm, WrittenPack, has_mean
from ..torch_seams.hooks import NO_BACKWARD, BackwardState, GradientHook, current_backward
from ..torch_seams.tensors import as_plain, dense_strides
from ..tracing.ranges import Ranges

DEFAULT_BUCKET = 2**23  # elements
_SENT = (
    "a parameter received a gradient after those of its bucket had been sent: its module runs in several re-entrant "
    "checkpoints (use checkpoint(..., use_reentrant=False)), or backward had gone on to a module that was called "
    "before it (go back through each by a backward of its own)"
)


class BucketPlan(NamedTuple):
    """Gradients that travel together, and where each lies in the packed form [N] ([Note: packed gradients]).

    Attributes:
        wire: dtype of the packed form.
        form: whose items count within the bucket.
        blocks: in which they travel; None: as they are.
    """

    indices: list[int]
    wire: torch.dtype
    form: PackedForm
    blocks: BlockFormat | None

    @property
    def nbytes(self) -> int:
        return self.form.starts[-1] * self.wire.itemsize


def plan_buckets(
    params: Sequence[nn.Parameter], owners: Sequence[int], world_size: int, policy: ReducePolicy
) -> list[BucketPlan]:
    """Plans which gradients travel together, how and where each lies, in the order of sending.

    Buckets hold one dtype and at most ``policy.bucket_numel`` elements, and an eighth of all: so the one
    in flight stays small beside the gradients, however small the model.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, p in enumerate(params):
        by_dtype.setdefault(p.dtype, []).append(i)
    cap = DEFAULT_BUCKET if policy.bucket_numel is None else policy.bucket_numel
    if cap:
        cap = min(cap, max(2**16, sum(p.numel() for p in params) // 8))
    plan = []
    for dtype, indices in by_dtype.items():
        wire = policy.dtype if policy.dtype is not None and policy.dtype.itemsize < dtype.itemsize else dtype
        for chosen in buckets_by_size([params[i].numel() for i in indices], cap):
            together = [indices[k] for k in chosen]
            numels = [params[i].numel() for i in together]
            step = alignment(wire.itemsize)
            layout = segment_layout(numels, [owners[i] for i in together], world_size, step=step)
            blocks = format_for(policy.compression, sum(numels) // world_size, wire)
            sizes: Sequence[int] = layout.sizes
            if blocks is not None:  # flags are in blocks of their own
                step = blocks.numel
                sizes = [rounded_up(size, step) for size in sizes]
            form = PackedForm(layout.pieces, sizes, even=False, step=step)
            plan.append(BucketPlan(together, wire, form, blocks))
    # by the place of the last one, which completes the bucket
    return sorted(plan, key=lambda entry: entry.indices[-1])


class Bucket:
    """Gradients that travel together, as planned, packed into memory that all buckets share.

    Args:
        index: its place in the order of sending.
        slot: that memory, in bytes.
        error_feedback: see :class:`~shardkit.reduction.compression.CompressedReduceScatter`.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        slot: torch.Tensor,
        group: Group,
        error_feedback: bool,
    ) -> None:
        self.label = f"gradients of bucket {index}"
        self.indices, self.form = plan.indices, plan.form
        self.params = [params[i] for i in plan.indices]
        self.waiting = len(plan.indices)
        self.packed = slot[: plan.nbytes].view(plan.wire)
        shapes, strides = [p.shape for p in self.params], [dense_strides(p) for p in self.params]
        self.pack = WrittenPack(plan.form, self.packed, shapes, strides, plan.blocks is not None)
        self.compressed = (
            None
            if plan.blocks is None
            else CompressedReduceScatter(group, plan.blocks, plan.form.sizes, error_feedback)
        )
        self.has_mean = has_mean(plan.wire) or plan.blocks is not None
        self.ranges = Ranges(f"bucket {index}", group.ranks, reduce=plan.nbytes)
        self.cuts, owned = plan.form.cuts(group.rank)
        # of each owned gradient: index here, place among the cuts, shape and strides unless the cut is it
        self.owned = [
            (i, at, None if len(shapes[i]) == 1 < len(owned) else (shapes[i], strides[i])) for i, at in owned
        ]


class InFlight(NamedTuple):
    bucket: Bucket
    work: Work
    shard: torch.Tensor  # [S], this rank's part of the result
    had: list[bool] | None  # which gradients this rank had; None: all


class Reducer:
    """Reduces the gradients of parameters to their owners.

    Args:
        params: trainable parameters in the order in which backward reaches them.
        owners: rank of each.
        group: the ranks; a channel of theirs for gradients.
        policy: bucket size and dtype on the wire.
        state: shared with the other hooks of the wrapped module.
        reduced: class of what owners get (see ``shard_gradients.py``).
        may_send: whether those that this backward has come to before have sent all.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        owners: Sequence[int],
        group: Group,
        policy: ReducePolicy,
        state: BackwardState,
        reduced: type[torch.Tensor],
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        self._reduced, self._may_send = reduced, may_send
        self._params = list(params)
        self._owned = [owner == group.rank for owner in owners]
        self._group = group
        self._world = group.world_size
        self._state = state
        self._is_mean = [False] * len(self._params)
        self._fired = [False] * len(self._params)
        self._next = 0
        self._in_flight: InFlight | None = None
        self._microbatches = microbatches(policy, group.world_size)  # of a fixed order, else 0
        self._sums: dict[int, torch.Tensor] = {}  # in a fixed order, what this backward adds to
        plan = plan_buckets(self._params, owners, group.world_size, policy)
        # all buckets are packed into the same memory, one after the other
        self._slot = torch.empty(
            max(b.nbytes for b in plan), dtype=torch.uint8, device=self._params[0].device
        )
        self.buckets = [
            Bucket(i, planned, self._params, self._slot, group, policy.error_feedback)
            for i, planned in enumerate(plan)
        ]
        self._slot_is_taken = True
        self._release_slot()

    # ------------------------------------------------------------ hooks
    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        """Yields for each parameter what to call before and after it gets a gradient."""
        bucket_of = {i: (k, b) for k, b in enumerate(self.buckets) for i in b.indices}
        return [
            (p, self._before(i) if self._owned[i] else None, self._after(i, *bucket_of[i]))
            for i, p in enumerate(self._params)
        ]

    def _before(self, index: int) -> GradientHook:
        is_mean, param, world, state = self._is_mean, self._params[index], self._world, self._state
        in_order = self._microbatches > 0

        def before(_: torch.Tensor) -> None:
            if is_mean[index] and not state.asked:  # see [Note: accumulating]
                if in_order:
                    self._put_aside(index)
                    return
                is_mean[index] = False
                if param.grad is not None:
                    with torch.no_grad():
                        param.grad.mul_(world)

        return before

    def _put_aside(self, index: int) -> None:
        param = self._params[index]
        if self._is_mean[index] and param.grad is not None:
            self._sums[index], param.grad = param.grad, None
        self._is_mean[index] = False

    def _after(self, index: int, position: int, bucket: Bucket) -> GradientHook:
        # one closure a parameter: these run for every gradient, and a call costs more than the work
        state, fired = self._state, self._fired

        def after(_: torch.Tensor) -> None:
            if state.accumulating:
                state.unreduced = True
                return
            if state.task == NO_BACKWARD:
                state.begin()
            if position < self._next:
                raise LifecycleError(_SENT)
            if fired[index]:
                return
            fired[index] = True
            bucket.waiting -= 1
            # inside a nested backward more may follow for the same parameter: wait for the end
            if bucket.waiting or current_backward() != state.task:
                return
            if not state.before or self._may_send():
                self._send_ready()

        return after

    def means(self) -> set[nn.Parameter]:
        """Lists parameters whose gradient is a mean over ranks already."""
        return {p for p, mean in zip(self._params, self._is_mean, strict=True) if mean and p.grad is not None}

    def adopt_means(self, means: set[nn.Parameter]) -> None:
        """Takes over what an earlier reducer had reduced."""
        for i, p in enumerate(self._params):
            self._is_mean[i] = p in means

    @property
    def has_sent(self) -> bool:
        """Says whether all is on its way in this backward."""
        return self._next == len(self.buckets)

    # ------------------------------------------------------------ sending
    def _send_ready(self) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._send_ready()
            return
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._send(self.buckets[self._next])

    def send_rest(self) -> None:
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])

    @torch.no_grad()
    def finish(self) -> None:
        """Sends what is left, waits for everything, and leaves reduced gradients with their owners."""
        self.send_rest()
        if self._in_flight is not None:
            self._receive(self._in_flight)
        self.abandon()

    def abandon(self) -> None:
        if self._in_flight is not None:  # its memory is in use until it is through, or has failed
            with contextlib.suppress(RuntimeError):
                self._in_flight.work.wait()
            self._in_flight = None
        self._release_slot()
        for i, earlier in self._sums.items():  # nothing has come for them
            self._params[i].grad = earlier
            self._is_mean[i] = True
        self._sums.clear()
        self._next = 0
        self._fired[:] = [False] * len(self._fired)
        for bucket in self.buckets:
            bucket.waiting = len(bucket.indices)

    def _release_slot(self) -> None:
        if self._slot_is_taken:
            self._group.backend.release_storage(self._slot)
            self._slot_is_taken = False

    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        if self._in_flight is not None:
            self._receive(self._in_flight)
        if not self._slot_is_taken:
            self._group.backend.take_storage(self._slot)
            self._slot_is_taken = True
        with bucket.ranges.reduce():
            had = self._pack(bucket)
            op = ReduceOp.AVG if bucket.has_mean else ReduceOp.SUM
            if bucket.compressed is not None:
                shard, work = bucket.compressed.start(
                    bucket.packed, bucket.label, complete=had is None, op=op
                )
            elif self._microbatches:
                shard, work = exchange(
                    self._group, bucket.packed, bucket.form.sizes, self._microbatches, bucket.label
                )
            else:
                sizes = bucket.form.sizes
                shard = bucket.packed.new_empty(sizes[self._group.rank])
                work = self._group.reduce_scatter_into(
                    shard, bucket.packed, sizes, op=op, async_op=True, label=bucket.label
                )
        self._in_flight = InFlight(bucket, work, shard, had)

    def _pack(self, bucket: Bucket) -> list[bool] | None:
        """Copies gradients and flags to their places and gives the gradients back.

        Returns which gradients this rank has; None if it has all.
        """
        gradients: list[torch.Tensor | None] = []
        unscaled, missing = [], False
        for i, param, view in zip(bucket.indices, bucket.params, bucket.pack.whole, strict=True):
            if self._microbatches:
                self._put_aside(i)
            grad = param.grad
            gradients.append(grad)
            if grad is None:
                missing = True
            else:
                param.grad = None
                if self._is_mean[i]:  # of an owner that got nothing to add in this backward
                    unscaled.append(view)
            self._is_mean[i] = False
        had = [g is not None for g in gradients] if missing else None
        bucket.pack.write(gradients, had)
        if unscaled:
            torch._foreach_mul_(unscaled, self._world)
        if not bucket.has_mean and not self._microbatches:
            bucket.packed.mul_(1.0 / self._world)
        return had

    def _receive(self, flight: InFlight) -> None:
        bucket, work, shard, had = flight
        with bucket.ranges.reduce_wait():
            work.wait()
        self._in_flight = None
        if had is not None:
            had = bucket.form.anywhere(had, shard, self._group.rank)
        for part in contributions(shard, self._world) if self._microbatches else (shard,):
            parts = part.split_with_sizes(bucket.cuts) if len(bucket.owned) > 1 else [part]
            for i, place, lies in bucket.owned:
                if had is None or had[i]:
                    param, grad = bucket.params[i], parts[place]
                    if lies is not None:
                        grad = grad.as_strided(*lies)
                    if grad.dtype != param.dtype:
                        grad = grad.to(param.dtype)
                    if self._microbatches:
                        grad = self._added(bucket.indices[i], grad)
                    grad.__class__ = self._reduced
                    param.grad = grad
                    self._is_mean[bucket.indices[i]] = True

    def _added(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Adds one micro-batch's share to the step's sum so far."""
        total = self._sums.pop(index, None)
        if total is None and self._is_mean[index]:
            total = self._params[index].grad
        if total is None:
            return gradient
        with as_plain():
            return total.add_(gradient)
