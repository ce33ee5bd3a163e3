"""Ties a module's backward to the reduction of its gradients.

One object for each wrapper. It decides which parameters are reduced how (in buckets, as sparse rows, by flat segments,
or to everybody where no optimizer owns them), starts over when parameters are frozen or added, and keeps
the optimizers from stepping on unfinished gradients.

[Note: several modules] Gradients of all modules that the same ranks train go through one channel, and those of equal
shapes would be added to each other's if ranks sent in another order. So where one backward goes through several
modules, a later one waits until all buckets of those before it are sent. A rank may lack a gradient of these; then that
is at the end of backward. What else is sent at the end comes after all modules' buckets. From the second module on,
ranks agree on whose backward has ended, before anything of it is used, in the channel that keeps an order: a
comparison, in a step like the last. That is after all modules' sending: a rank may send in the course of backward, and
wait for, what another one sends at its end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.utils.stateless import _functional_call
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Group, ReduceOp, Work, not_compiled
from ..checks import are_several, check_same_everywhere, facts_of_all, numbers_of, parameter_fact
from ..errors import ConfigurationError, LifecycleError
from ..layout import alignment, buckets_by_size, rounded_up, segment_layout
from ..policy import ReducePolicy
from ..reduction.compression import BlockFormat, CompressedReduceScatter, format_for
from ..reduction.ordered import Rounds, contributions, exchange, microbatches, refuse_other
from ..reduction.packing import PackedForm, WrittenPack, has_mean
from ..reduction.shard_gradients import GradientInParts, asked_in_parts, gradient_class
from ..torch_seams.hooks import (
    DROPPED,
    NO_BACKWARD,
    BackwardState,
    GradientHook,
    GradientHooks,
    after_backward,
    callers,
    check_asked_gradients,
    current_backward,
    moments,
    tensors_in,
    watch_outputs,
)
from ..torch_seams.tensors import alike, as_plain, dense_strides, memory_of
from ..tracing.ranges import Range, Ranges, leave
from ..types import ProcessGroup, Tree
from .optimizer import OSS
from .segments import FlatSegment

# ------------------------------------------------------------ buckets of gradients
# Averages gradients to their owners while backward runs (ZeRO stage 2, arXiv 1910.02054).
#
# Legend: W world size, N numel of a bucket, S numel of this rank's part of it.
#
# [Note: buckets] Parameters are grouped in the order in which backward reaches them. When all gradients of a bucket
# are there they are packed by owner in one operation, given back, and reduce-scattered; the owner's
# gradients then are views of the result [S]. Buckets are sent in one fixed order on all ranks, so a
# parameter that is unused on some ranks can't make them meet the wrong partner. One is in flight at a time, while
# backward makes the gradients of the next: a second would cost memory and gains nothing where reducing is the
# slower part.
#
# [Note: which gradients exist] A plain process leaves ``grad=None`` where a parameter was not used, and the
# optimizer then skips it. With each bucket travels one flag for each parameter ([Note: packed gradients]).
#
# [Note: accumulating] ``param.grad`` of an owner holds either this rank's own unreduced gradient (after ``no_sync``) or
# the mean over all ranks (after a reduction). Before a mean gets more added it is multiplied by W: then one
# more reduction gives mean + mean. Nothing has to be stored beside ``param.grad``, so every way to clear, clip or
# unscale gradients works. With a fixed order ([Note: fixed order] in ``reduction/ordered.py``) it is put aside instead,
# and what comes is added to it.

DEFAULT_BUCKET = 2**23  # elements
_SENT = (
    "a parameter received a gradient after those of its bucket had been sent: its module runs in several re-entrant "
    "checkpoints (in place of these, or of checkpoint_wrapper, take torch's checkpoint(..., use_reentrant=False)), or "
    "backward had gone on to a module that was called before it (go back through each by a backward of its own)"
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
        policy: see :class:`~shardkit.reduction.compression.CompressedReduceScatter` for its feedback.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        slot: torch.Tensor,
        group: Group,
        policy: ReducePolicy,
    ) -> None:
        self.label = f"gradients of bucket {index}"
        self.indices, self.form = plan.indices, plan.form
        self.params = [params[i] for i in plan.indices]
        self.waiting = len(plan.indices)
        self.packed = slot[: plan.nbytes].view(plan.wire)
        shapes, strides = [p.shape for p in self.params], [dense_strides(p) for p in self.params]
        self.has_mean = has_mean(plan.wire) or plan.blocks is not None
        mean_over = group if self.has_mean and policy.order is None else None
        self.pack = WrittenPack(plan.form, self.packed, shapes, strides, plan.blocks is not None, mean_over)
        self.compressed = (
            None
            if plan.blocks is None
            else CompressedReduceScatter(group, plan.blocks, plan.form.sizes, policy.error_feedback)
        )
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


class ToOwners:
    """Leaves means with owners alone, who have to tell them from gradients of their own."""

    def __init__(self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group) -> None:
        self._params, self._group = list(params), group
        self._elsewhere = {p for p, owner in zip(params, owners, strict=True) if owner != group.rank}
        self._is_mean = [False] * len(self._params)

    def means(self) -> set[nn.Parameter]:
        """Lists parameters whose gradient is a mean over ranks already."""
        return {p for p, mean in zip(self._params, self._is_mean, strict=True) if mean and p.grad is not None}

    def adopt_means(self, means: set[nn.Parameter]) -> None:
        """Takes over what has been reduced before; what all ranks got, as no optimizer had it, only owners keep."""
        for p in means & self._elsewhere:
            p.grad = None
        self._is_mean[:] = [p in means and p.grad is not None for p in self._params]


class Reducer(ToOwners):
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
        super().__init__(params, owners, group)
        self._reduced, self._may_send = reduced, may_send
        self._world = group.world_size
        self._state = state
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
            Bucket(i, planned, self._params, self._slot, group, policy) for i, planned in enumerate(plan)
        ]
        self._slot_is_taken = True
        self._release_slot()

    # ------------------------------------------------------------ hooks
    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        """Yields for each parameter what to call before and after it gets a gradient."""
        bucket_of = {i: (k, b) for k, b in enumerate(self.buckets) for i in b.indices}
        return [
            (p, None if p in self._elsewhere else self._before(i), self._after(i, *bucket_of[i]))
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
            had, kept = self._pack(bucket)
            op = ReduceOp.AVG if bucket.has_mean else ReduceOp.SUM
            if bucket.compressed is not None:
                shard, work = bucket.compressed.start(
                    bucket.packed, bucket.label, complete=had is None, op=op
                )
            elif self._microbatches:
                shard, work = exchange(
                    self._group, bucket.packed, bucket.form.sizes, self._microbatches, bucket.label
                )
            elif bucket.pack.exchanges:
                shard, work = bucket.pack.exchange(self._group, kept, bucket.label)
            else:
                sizes = bucket.form.sizes
                shard = bucket.packed.new_empty(sizes[self._group.rank])
                work = self._group.reduce_scatter_into(
                    shard, bucket.packed, sizes, op=op, async_op=True, label=bucket.label
                )
        self._in_flight = InFlight(bucket, work, shard, had)

    def _pack(self, bucket: Bucket) -> tuple[list[bool] | None, list[torch.Tensor | None]]:
        """Copies gradients and flags to their places; returns which this rank has (None: all), and which it keeps."""
        gradients: list[torch.Tensor | None] = []
        for i, param in zip(bucket.indices, bucket.params, strict=True):
            if self._microbatches:
                self._put_aside(i)
            grad, param.grad = param.grad, None
            if grad is not None and self._is_mean[i]:  # of an owner that got nothing to add in this backward
                with as_plain():
                    grad = grad * self._world
            gradients.append(grad)
            self._is_mean[i] = False
        there = [g is not None for g in gradients]
        had = there if False in there else None
        kept = bucket.pack.write(gradients, had)
        if not bucket.has_mean and not self._microbatches:
            bucket.packed.mul_(1.0 / self._world)
        return had, kept

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


# ------------------------------------------------------------ the exchange of one module

logger = logging.getLogger("shardkit")
# Reduces the gradients of some of the parameters at the end of backward.
GradientPart: TypeAlias = "SegmentReducer | EverywhereReducer | SparseReducer"


class GradientExchange:
    """Listens to the backward of a module and reduces its gradients to their owners.

    Attributes:
        group: ranks that train together.
        policy: how gradients are reduced.
        hooks: on the module's parameters.
        rounds: counts backwards of a step, where the order of sums is fixed.
        name: the module's class, and which one it is of those that these ranks train.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[OSS],
        group: Group,
        policy: ReducePolicy,
        buffers: BufferSync,
        run_id: str,
        syncs: bool,
    ) -> None:
        self.state = BackwardState(self._end_of_backward)
        self._module, self._syncs = module, syncs
        # that ranks have not agreed on; a digest of what was there before the first
        self._loads: list[str] = []
        _hear_of_loads()
        self._device_type = next((p.device.type for p in module.parameters()), "")
        self._optimizers = list(optimizers)
        self.group = group
        self._channel, self._order = group.channel("gradients"), group.channel("parameters")
        self.name = f"{type(module).__name__} {numbers_of([(group, run_id)])[0]}"
        self.policy = policy
        self._buffers = buffers
        self.hooks = GradientHooks(
            "a hook for when a parameter has got its gradient can't be registered after ShardedDDP has wrapped the "
            "module: gradients are on their way to other ranks then. Change gradients between backward and step, or "
            "in a hook before the step (OSS.register_step_pre_hook); param.register_hook sees this rank's gradient"
        )
        self._reducer: Reducer | None = None  # of what is sent in the course of backward
        self._parts: list[GradientPart] = []  # of what is sent at its end
        self._frozen_means: set[nn.Parameter] = set()  # frozen after their gradients had been reduced
        self.rounds: Rounds | None = None
        self.ranges = Ranges("root", group.ranks)
        self._forwards: list[Range] = []  # in progress
        self._build()
        for optimizer in self._optimizers:
            optimizer._before_step.append(self._before_step)
            optimizer._if_unreduced.append((self.state, self._check_means))
            optimizer.adds_in_order = policy.order is not None

    def close(self) -> None:
        """Stops listening; the module and the optimizers can be wrapped again."""
        self.hooks.remove()
        for optimizer in self._optimizers:
            if self._before_step in optimizer._before_step:
                optimizer._before_step.remove(self._before_step)
                optimizer._if_unreduced.remove((self.state, self._check_means))

    @property
    def depends_on_data(self) -> bool:
        """Sends what depends on the batch: rows of sparse gradients."""
        return any(isinstance(part, SparseReducer) for part in self._parts)

    @property
    def buckets(self) -> list[Bucket]:
        """Lists the gradient buckets, in the order of sending."""
        return [] if self._reducer is None else self._reducer.buckets

    # ------------------------------------------------------------ what is reduced how
    def _build(self) -> None:
        self.hooks.remove()
        check_asked_gradients(_refuse_own)
        owner = {p: o.owner_of(p) for o in self._optimizers for p in o._parameters()}
        self._reducer, self._parts = None, []
        self._is_new = True
        for optimizer in self._optimizers:
            optimizer.refresh_trainable()
        self._watched = list(dict.fromkeys([*self._module.parameters(), *owner]))
        _exchanges.update((p, weakref.ref(self)) for p in self._watched)
        trainable = [p for p in dict.fromkeys(self._module.parameters()) if p.requires_grad]
        trainable.reverse()  # backward reaches the last module first
        in_order = self.policy.order is not None
        whole = {p for o in self._optimizers if o.placement.runs_whole for p in o._parameters()}
        if self.group.backend.even_shards_only:
            for segment in (s for o in self._optimizers for s in o.placement.segments):
                self._parts.append(SegmentReducer(segment, self._channel, self.policy.dtype, self.state))
        elif self.group.world_size > 1 or in_order:
            self._reduce_to_owners([p for p in trainable if p not in whole], owner)
        everywhere = [p for p in trainable if p not in owner or p in whole]
        if everywhere or any(p in sparse_parameters(self._module) for p in trainable):
            refuse_other(
                self.policy, "sparse gradients or parameters without an OSS, which no owner alone sums"
            )
        # what is frozen between micro-batches has a part of the step's sums
        kept = [p for p in self._watched if owner.get(p) == self.group.rank]
        count = microbatches(self.policy, self.group.world_size)
        if self.rounds is not None:
            self.rounds.params = kept
        elif count:
            self.rounds = Rounds(kept, count, self.group.world_size)
        if everywhere and self.group.world_size > 1:
            self._parts.append(EverywhereReducer(everywhere, self._channel, self.state, self.ranges))
        for part in self._parts if self._reducer is None else (self._reducer, *self._parts):
            for param, before, after in part.hooks():
                self.hooks.attach(param, before, after)
        self._seen = self._look()

    def _reduce_to_owners(self, trainable: list[nn.Parameter], owner: dict[nn.Parameter, int]) -> None:
        sparse = sparse_parameters(self._module)
        dense = [p for p in trainable if p in owner and p not in sparse]
        if dense:
            owners = [owner[p] for p in dense]
            reduced = gradient_class(
                self.group, "OSS.clip_grad_norm", False, dense, self.policy.order is not None
            )
            self._reducer = Reducer(
                dense, owners, self._channel, self.policy, self.state, reduced, self._may_send
            )
        rows = [p for p in trainable if p in owner and p in sparse]
        if rows:
            self._parts.append(SparseReducer(rows, [owner[p] for p in rows], self._channel, self.state))

    def _look(self) -> list[Tree]:
        own, facts = set[int](), list[Tree]()
        for m in paths_in(self._module):
            own.update(map(id, m._parameters.values()))
        for o in self._optimizers:  # a step may have found others frozen, which have been unfrozen since
            facts += o._trainable, len(o.param_groups)
        for p in self._watched:
            facts += p.requires_grad, p.dtype, p.device
        return [own, *facts]

    @not_compiled
    def refresh_if_changed(self, warn: bool) -> None:
        """Rebuilds after parameters were frozen, unfrozen, moved, cast, replaced, or added; not for one call alone."""
        if self._look() != self._seen and all(f.f_code is not _functional_call.__code__ for f in callers()):
            if warn:
                logger.warning("the module's trainable parameters changed; rebuilding the gradient buckets")
            self.refresh()

    def refresh(self) -> None:
        """Rebuilds from what is trainable now; gradients that were reduced stay so, and still move what is frozen now.

        Raises:
            LifecycleError: a parameter was frozen between backwards inside of ``no_sync``.
        """
        self.check_device()
        parts = [part for part in (self._reducer, *self._parts) if isinstance(part, ToOwners)]
        means = self._frozen_means.union(*[part.means() for part in parts])
        frozen = {p for p in self._watched if p.grad is not None and not p.requires_grad}
        has_own = self.state.unreduced and not frozen <= means
        what = "the module's parameters, of which some were frozen, unfrozen, moved, replaced or added,"
        facts = [(name, parameter_fact(p)) for name, p in self._module.named_parameters()]
        # a rank without a gradient of it would go on, and wait for the others
        if any(check_same_everywhere(self.group, facts, what, has_own)):
            raise LifecycleError(
                "a parameter was frozen between backwards inside of no_sync(): the gradient that it has would never be "
                "averaged over ranks. Freeze it before the step's first backward or after step(), or clear its gradient"
            )
        if self._syncs:  # those that are new
            broadcast_module(self._module, self._channel, self._seen[0])
            for segment in (s for o in self._optimizers for s in o.placement.segments):
                segment.take_values()
        self._build()
        self.adopt_means(means)
        self._frozen_means = frozen & means

    def adopt_means(self, params: set[nn.Parameter]) -> None:
        """Notes whose gradients, that came from elsewhere, are means over ranks already."""
        for part in (self._reducer, *self._parts):
            if isinstance(part, ToOwners):
                part.adopt_means(params | part.means())

    def begin_load(self) -> None:
        """Notes that values come, on this rank alone maybe; what compression has left out so far is forgotten."""
        for bucket in self.buckets:
            if bucket.compressed is not None:
                bucket.compressed.feedback.forget()
        self._loads.append("" if self._loads else self._digest())

    def _digest(self) -> str:
        # where even shards alone are, to read values would run what is recorded
        if self.group.world_size == 1 or self.group.backend.even_shards_only:
            return ""
        params = (p.detach() for p in self._module.parameters() if p.numel())
        return f"{zlib.crc32(repr([zlib.crc32(memory_of(p.cpu().contiguous())) for p in params]).encode()):x}"

    def _agree_on_loads(self) -> None:
        """Tells other ranks which values were loaded here, unless they are again what they were on all ranks."""
        loads, self._loads, now = self._loads, [], self._digest()
        if not now or now != loads[0] or not (self._syncs or loads[1:]):
            self._order.agree(f"load_state_dict() of {self.name}, values {now}")

    def check_device(self) -> None:
        """Raises ConfigurationError if the module was moved to a device of another type."""
        for name, param in self._module.named_parameters():
            if param.device.type != self._device_type:
                raise ConfigurationError(
                    f"rank {self.group.rank}: {name} was moved to {param.device} after the module was wrapped on "
                    f"{self._device_type}, where its ranks are connected and the optimizer's state lies; move the "
                    "module before you build OSS and ShardedDDP"
                )

    # ------------------------------------------------------------ a step's course
    @not_compiled
    def begin_forward(self) -> None:
        self.recover()
        if self._is_new:
            self._is_new = False
            for name, param in self._module.named_parameters():
                if param.grad is not None and param.grad.requires_grad:
                    raise ConfigurationError(
                        f"rank {self.group.rank}: the gradient of {name} requires a gradient itself, and reductions "
                        "have none; detach it (param.grad = param.grad.detach()), or clear it by zero_grad()"
                    )
        self.state.raised = ""
        if not self.state.is_due:
            self.state.began = next(moments)
        if not self.state.accumulating:
            if self._loads:
                self._agree_on_loads()
            self._buffers.sync_if_changed()
        if self.rounds is not None:
            self.rounds.begin()
        self._forwards.append(self.ranges.forward())
        self._forwards[-1].__enter__()

    @not_compiled
    def fail_forward(self, error: BaseException) -> None:
        """Notes that a training forward raised: other ranks that wait for its backward may want to know."""
        leave(self._forwards.pop())
        if not self.state.accumulating and self.state.task == NO_BACKWARD:
            self.state.left_out.add(next(moments))
        self.state.raised = f"{type(error).__name__}: {error}"

    @not_compiled
    def end_forward(self, outputs: object) -> None:
        """Sees to it, after a training forward, that its backward is noticed."""
        try:  # noqa: SIM105 - it would cost calls
            self._forwards.pop().__exit__(None, None, None)
        except RuntimeError:  # a profiler was started inside of it
            pass
        self._buffers.changed = self._buffers.enabled
        self.state.ended = number = next(moments)
        self.state.is_due = not self.state.accumulating
        if watch_outputs(tensors_in(outputs), partial(self.state.on_output, number)) and self.state.is_due:
            self.state.left_out.add(number)

    @not_compiled
    def recover(self) -> None:
        """Discards the state of a backward that raised."""
        if self.state.task != NO_BACKWARD and current_backward() == NO_BACKWARD:
            self.state.task = NO_BACKWARD
            if self._reducer is not None:
                self._reducer.abandon()
            self.group.agree(DROPPED)

    def leave_step(self) -> None:
        """Leaves a step wherever it is, on this rank alone; nothing of it is left, and nothing in flight."""
        self.state.leave()
        if self._reducer is not None:
            self._reducer.abandon()
        self._buffers.changed = False

    def _may_send(self) -> bool:
        self.state.sends_last()
        return all(state.owner.has_sent for state in self.state.before)

    @property
    def has_sent(self) -> bool:
        """Says whether all buckets are on their way."""
        return self._reducer is None or self._reducer.has_sent

    @torch.no_grad()
    def send_rest(self) -> None:
        """Sends all buckets that are left, whatever this rank lacks."""
        if self._may_send() and self._reducer is not None:
            self._reducer.send_rest()

    def _end_of_backward(self, of_all: bool = False) -> None:
        if self.state.accumulating and not of_all:
            return
        with self.ranges.finish():
            if self._reducer is not None:
                self._reducer.finish()
        if current_backward() != NO_BACKWARD and are_several(self.group):  # see [Note: several modules]
            after_backward(self._end_of_all)
        else:
            self._end_of_all()

    @not_compiled
    def _end_of_all(self) -> None:
        with self.ranges.finish():
            for part in self._parts:
                part.finish()
        if count := len(self.state.left_out):
            self._order.agree(f"a backward of {self.name} after {count} forwards that had none")
            self.state.left_out.clear()
        if are_several(self.group):
            self._order.agree(f"the end of backward of {self.name}")
        self.state.unreduced = False
        if self.rounds is not None:
            self.rounds.end()
        self._buffers.sync_if_changed(new=False)

    @not_compiled
    def reduce_now(self) -> None:
        """Reduces what was accumulated under ``no_sync``."""
        if not self.state.unreduced:
            raise LifecycleError(
                "No gradients wait to be reduced: reduce() was called twice, or there was no backward inside no_sync() "
                "since the last reduction."
            )
        self._end_of_backward(of_all=True)

    @not_compiled
    def _before_step(self) -> None:
        if self.state.task != NO_BACKWARD:
            raise LifecycleError(
                "the last backward did not finish (it raised an exception), so gradients are incomplete. Call "
                "zero_grad() on the wrapped model and run forward and backward again before step()."
            )
        if self._loads:
            self._agree_on_loads()
        if self.rounds is not None:
            self.rounds.check_step()
        if self._buffers.changed and not self.state.accumulating:
            self._buffers.sync_if_changed()

    def _check_means(self) -> None:
        """Refuses gradients that ``no_sync`` has left each rank's own, on all ranks (collective).

        A program may have averaged them by itself, or cleared them: then all ranks have the same.
        """
        params = [p for optimizer in self._optimizers for p in optimizer._all]
        grads = [(index, p.grad) for index, p in enumerate(params) if p.grad is not None]
        if self.group.world_size == 1 or not grads:
            return
        if any(isinstance(gradient, GradientInParts) for _, gradient in grads):
            raise asked_in_parts()  # inside of uneven(), where no other rank compares
        if not self.group.backend.even_shards_only:  # there to read one would compile what is recorded
            own = [
                (k, *(str(f(g.to_dense()).item()) for f in (torch.sum, torch.linalg.vector_norm)))
                for k, g in grads
            ]
            everybody = facts_of_all([self.group], own, label="a step after backwards inside of no_sync()")
            if all(others == everybody[0] for others in everybody):
                return
        raise LifecycleError(
            f"rank {self.group.rank}: step() or clip_grad_norm() comes after a backward inside of no_sync(), and "
            "would take each owner's gradients for the mean over ranks. Run the last backward before a step "
            "outside of no_sync(), or call reduce() of the wrapped model"
        )


_exchanges: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of parameters


@functools.cache
def _hear_of_loads() -> None:
    """Has modules that load a state tell those who train their parameters: hooks would be in copies and files."""
    theirs = nn.Module.load_state_dict

    @functools.wraps(theirs)
    def load_state_dict(self: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
        for of in {found() for p in self.parameters() if (found := _exchanges.get(p)) is not None} - {None}:
            of.begin_load()
        return theirs(self, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


@contextlib.contextmanager
def _refuse_own(inputs: Sequence[torch.Tensor], accumulate: bool) -> Iterator[None]:
    """Raises LifecycleError where gradients of parameters are asked for that nothing averages."""
    states = []
    try:
        for asked in inputs if not accumulate else ():
            found = _exchanges.get(asked)
            exchange: GradientExchange | None = None if found is None else found()
            if exchange is None or exchange.group.world_size == 1 or not exchange.hooks.after:
                continue
            if not exchange.state.accumulating:
                raise LifecycleError(
                    f"rank {exchange.group.rank}: torch.autograd.grad would give this rank's own gradients of "
                    "parameters of a ShardedDDP, which nothing averages. Call loss.backward() and read .grad on the "
                    "owners; inside of no_sync() gradients are this rank's own, as asked for"
                )
            states.append(exchange.state)
            exchange.state.asked = True
        yield
    finally:
        for state in states:
            state.asked = False


class SegmentReducer:
    """Reduces a whole flat segment at the end of backward, in one operation that is the same on all ranks."""

    def __init__(
        self, segment: FlatSegment, group: Group, wire: torch.dtype | None, state: BackwardState
    ) -> None:
        self._segment, self._group, self._wire, self._state = segment, group, wire, state

    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        after, segment = begin_only(self._state), self._segment
        before = segment.notice_clearing
        return [
            (p, before if p is segment.marked else None, after) for p in segment.params if p.requires_grad
        ]

    def finish(self) -> None:
        self._segment.reduce_gradients(self._group, self._wire)


class EverywhereReducer:
    """Parameters whose mean goes to every rank, as in plain data parallelism: those that no optimizer here owns, and
    those of optimizers that every rank runs whole.

    A mean that gets local gradients added needs no care: the mean of (mean + local) is what is wanted.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], group: Group, state: BackwardState, ranges: Ranges
    ) -> None:
        self._params, self._group, self._state, self._ranges = list(params), group, state, ranges

    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        return [(p, None, begin_only(self._state)) for p in self._params]

    @torch.no_grad()
    def finish(self) -> None:
        flags = None
        if self._group.backend.has_storage:  # else all ranks record one program
            there = [p.grad is not None for p in self._params]
            flags = self._params[0].new_tensor(there, dtype=torch.float32)
            self._group.all_reduce(flags, op=ReduceOp.MAX, label="which gradients without an owner there are")
        for p in self._params:  # whichever there are: who skips a step issues the calls of others
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            with self._ranges.all_reduce():
                self._group.all_reduce(p.grad, op=ReduceOp.AVG, label="gradient without an owner")
        for p, has in zip(self._params, [] if flags is None else flags.tolist(), strict=False):
            p.grad = p.grad if has else None  # optimizers leave it out, as in one process


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    return {
        m.weight
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and isinstance(m.weight, nn.Parameter)
    }


def begin_only(state: BackwardState) -> GradientHook:
    """Returns a hook for gradients that are reduced at the end of backward."""

    def after(_: torch.Tensor) -> None:
        if state.accumulating:
            state.unreduced = True
        elif state.task == NO_BACKWARD:
            state.begin()

    return after


class SparseReducer(ToOwners):
    """Sends each rank's rows to the owner, who averages them; done at the end of backward."""

    def __init__(
        self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group, state: BackwardState
    ) -> None:
        super().__init__(params, owners, group)
        self._owners, self._state = list(owners), state

    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        after = begin_only(self._state)
        return [(p, partial(self._make_local, i), after) for i, p in enumerate(self._params)]

    @not_compiled
    @torch.no_grad()
    def _make_local(self, index: int, _: torch.Tensor | None = None) -> None:
        """Multiplies a mean that gets a local gradient added, as dense ones are."""
        if self._state.asked:
            return
        grad = self._params[index].grad
        if self._is_mean[index] and grad is not None:
            grad.mul_(self._group.world_size)
        self._is_mean[index] = False

    @torch.no_grad()
    def finish(self) -> None:
        for i, p in enumerate(self._params):
            self._make_local(i)
            self._is_mean[i] = self._reduce(p, self._owners[i])

    def _reduce(self, param: nn.Parameter, owner: int) -> bool:
        """Leaves the mean with the owner; whether this rank has it now."""
        world, mine = self._group.world_size, self._group.rank == owner
        grad, param.grad = param.grad, None
        dense = grad is not None and not grad.is_sparse
        given = param[:0] if grad is None else grad
        rows = (given if given.is_sparse else given.to_sparse(1)).coalesce()
        # [W, 3]: rows, whether any gradient, whether dense
        facts = torch.zeros(world * 3, dtype=torch.int64, device=param.device)
        own = facts[self._group.rank * 3 : self._group.rank * 3 + 3]
        own.copy_(torch.tensor([rows._nnz(), int(grad is not None), int(dense)], device="cpu"))
        self._group.all_gather_into(facts, own, label="rows of sparse gradients")
        table = facts.view(world, 3).tolist()
        if not any(used for _, used, _ in table):
            return False
        counts = [row[0] for row in table]
        indices = self._to_owner(rows.indices()[0], counts, owner, 1)
        values = self._to_owner(rows.values(), counts, owner, param.numel() // param.shape[0])
        if not mine:
            return False
        # said to be right, or torch warns that it does not check them
        values = values.view(-1, *param.shape[1:])
        total = torch.sparse_coo_tensor(indices[None], values, param.shape, check_invariants=False).coalesce()
        total._values().div_(world)
        param.grad = total.to_dense() if any(is_dense for _, _, is_dense in table) else total
        return True

    def _to_owner(self, tensor: torch.Tensor, counts: list[int], owner: int, width: int) -> torch.Tensor:
        world, rank = self._group.world_size, self._group.rank
        flat = tensor.contiguous().view(-1)
        receive = [c * width if rank == owner else 0 for c in counts]
        send = [flat.numel() if r == owner else 0 for r in range(world)]
        out = flat.new_empty(sum(receive))
        self._group.all_to_all(out, flat, receive, send, label="sparse gradients")
        return out


# ------------------------------------------------------------ what is not trained: start values, buffers, statistics
@torch.no_grad()
def broadcast_together(tensors: Sequence[torch.Tensor], group: Group, label: str) -> None:
    """Replaces the others' values by rank 0's, one collective for each dtype.

    Written through ``.data``: a forward may have saved a buffer for its backward, and what it saved stays valid.
    """
    for same in alike(t.data for t in tensors):
        flat = torch.cat([t.reshape(-1) for t in same])
        wire = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
        group.broadcast(wire, 0, label=label)
        for t, piece in zip(same, wire.split([t.numel() for t in same]), strict=True):
            t.copy_(piece.view(t.shape))


def broadcast_module(module: nn.Module, group: Group, known: Collection[int] = ()) -> None:
    """Replaces the others' parameters by rank 0's, but for those of known ids; buffers too, where none are."""
    if group.world_size == 1:
        return
    for p in module.parameters():  # one at a time: no second copy of the model
        if id(p) not in known:
            broadcast_together([p], group, "parameters of rank 0")
    broadcast_together(list(module.buffers() if not known else ()), group, "buffers of rank 0")


def paths_in(module: nn.Module) -> dict[nn.Module, str]:
    """Finds all modules in it, each once: torch's own walk makes several calls of Python's for each."""
    modules, paths = [module], {module: ""}
    for m in modules:  # which grows
        for name, child in m._modules.items():
            if child is not None and child not in paths:
                paths[child] = f"{paths[m]}{name}."
                modules.append(child)
    return paths


class BufferSync:
    """Replaces buffers by rank 0's after training forwards.

    fairscale does this at every forward, in eval too, and hangs when only one rank evaluates. Here it is done
    where all ranks are anyway (end of backward, step, next training forward), so that whoever evaluates finds
    rank 0's buffers without talking.

    Attributes:
        changed: a training forward ran since the last time.
    """

    def __init__(self, module: nn.Module, group: Group, enabled: bool) -> None:
        self._group, self._module = group, module
        self._unsaved = {(m, name) for m in module.modules() for name in m._non_persistent_buffers_set}
        self._known = list(self._look())
        self.enabled = enabled and group.world_size > 1
        if self.enabled and self._known:  # connections that only models with buffers need
            group.channel("buffers")
        self.changed = False
        self.ranges = Ranges("buffers", group.ranks)

    def _look(self) -> dict[tuple[object, ...], torch.Tensor]:
        """Finds the buffers that there are now, each once, with what ranks have to have in common.

        Not those that are registered later and not saved: what a forward caches may be of another length on each rank.
        """
        found: dict[int, tuple[tuple[object, ...], torch.Tensor]] = {}
        for m, path in paths_in(self._module).items():
            for name, b in m._buffers.items():
                if b is not None and (
                    name not in m._non_persistent_buffers_set or (m, name) in self._unsaved
                ):
                    found.setdefault(id(b), ((path + name, b.shape, b.dtype), b))
        return dict(found.values())

    def sync(self, new: bool = True) -> None:
        """Replaces them now (every rank calls); without ``new`` not those that were registered since the last time."""
        if self._group.world_size == 1:
            return
        known, facts = self._known, list(found := self._look())
        if known != facts and (new or not {*known} <= {*facts}):
            self._known = facts
            others = ", ".join(sorted(map(str, {*known} ^ {*facts})))
            self._group.agree(f"buffers that were registered, removed or replaced: {others}")
        self.changed = self._known != facts
        if self._known:
            with self.ranges.buffers():
                ours = list(map(found.__getitem__, self._known))
                broadcast_together(ours, self._group.channel("buffers"), "buffers of rank 0")

    def sync_if_changed(self, new: bool = True) -> None:
        """Replaces them after a training forward, and before one if some were registered since: it finds rank 0's.

        At the end of backward the new ones wait, for step or a forward: a rank that runs out of memory has none.
        """
        if self.enabled and (self.changed or (new and list(self._look()) != self._known)):
            self.sync(new)


def connect_sync_batch_norm(module: nn.Module, process_group: ProcessGroup, group: Group) -> None:
    """Gives SyncBatchNorm layers without a group of their own the wrapper's.

    Args:
        process_group: what the user passed: torch's process group, a shardkit group, or None for all ranks.
        group: what became of it.
    """
    own = getattr(process_group, "process_group", process_group)  # a shardkit group on top of torch's
    connects = isinstance(own, torch.distributed.ProcessGroup)
    has_torchs_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.SyncBatchNorm):
            continue
        if connects and layer.process_group is None:
            layer.process_group = own
        if group.world_size > 1 and not has_torchs_ranks:
            # torch's layer would let each rank normalize by itself, unnoticed
            message = (
                f"SyncBatchNorm {name!r} trains with a process group of torch.distributed only, and ranks of backend "
                f"{group.backend.name!r} have none; use BatchNorm, or keep this layer in eval mode"
            )
            layer.register_forward_pre_hook(partial(_refuse_training, message))


def _refuse_training(message: str, layer: nn.Module, inputs: object) -> None:
    if layer.training:
        raise ConfigurationError(message)
