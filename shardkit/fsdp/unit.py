"""One module's share in the engine: what it needs gathered, how far its backward has come, how gradients travel.

Legend: W world size, S shard numel, F flags in one rank's part.

When a unit's gradients are there, they are packed ([Note: packed gradients] in ``reduction/packing.py``: rank by rank
its shard of the flat parameter, and a flag for each original parameter that lies there). Their own memory is given
back, and one reduce-scatter makes the part of this rank. Original parameters that no rank had a gradient for stay as
they are in the optimizer's step, as in a plain process (see ``optimizer_check.py``).

[Note: custom messages] Such an object gets the process group that the model is sharded over, as torch hands it over:
one for gathers and reductions. So all of them are in one order on all ranks, also where a backward has no plan. It sees
tensors of one dimension, rank by rank, in memory that it allocated itself, which costs a copy. What lies where in them
is ours alone: parameters as the unit's layout says, and flags for missing gradients behind the gradients of each rank.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, cycle, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, final

import torch
from torch.optim import Optimizer

from ..backend import DONE, Group, ReduceOp, Work, WorkThen, not_compiled
from ..errors import ConfigurationError, LifecycleError
from ..layout import Piece, ShardLayout, alignment, buckets_by_size, rounded_up
from ..optimizers.shards import changed_by_steps, take_part
from ..policy import ReducePolicy
from ..reduction.compression import BlockFormat, CompressedAllReduce, CompressedReduceScatter, format_for
from ..reduction.ordered import Rounds, contributions, exchange, microbatches, ranks_of, refuse_other
from ..reduction.packing import JoinedPack, PackedForm, WrittenPack, has_mean
from ..reduction.shard_gradients import StandingGradient
from ..torch_seams.hooks import NO_BACKWARD, GradientHooks, after_backward, current_backward
from ..torch_seams.tensors import as_plain
from ..tracing.ranges import UNNAMED, Ranges
from ..types import ProcessGroup, Tree
from .flat_param import (
    KEPT,
    SUMMONED,
    FlatParam,
    Registered,
    RegisteredShard,
    ShardedFlatParameter,
    Store,
    UnusedShard,
    add_gradient,
    rank_by_rank,
    start_together,
)
from .originals import SplitParameter, as_tensors, backward_when_summoned, name_of_original, written_original

if TYPE_CHECKING:
    from torch.distributed import Work as TorchsWork

    from .engine import Engine


_grad_of, _requires_grad = attrgetter("param.grad"), attrgetter("param.requires_grad")
_shape_of, _layout_of, _originals_of = map(attrgetter, ("shape", "layout", "originals"))


# ------------------------------------------------------------ messages that an object of the user's sends
Hook: TypeAlias = Callable[[torch.Tensor], object]


class Comm(Protocol):
    """Sends messages as torch's AllGather and ReduceScatter do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def __call__(self, **arguments: object) -> TorchsWork | None: ...


@dataclass(frozen=True)
class CustomComms:
    """Says what of a unit's messages is not sent here.

    Attributes:
        process_group: torch's, over which the others are sent.
        gather: sends values.
        scatter: sends gradients.
        sums: it forms sums, whose mean is formed here.
        hook: gets reduced gradients, and changes them in place.
    """

    process_group: ProcessGroup = None
    gather: Comm | None = None
    scatter: Comm | None = None
    sums: bool = False
    hook: Hook | None = None

    @property
    def are_custom(self) -> bool:
        """Says whether any of it is sent, or changed, by somebody else."""
        return (self.gather, self.scatter, self.hook) != (None, None, None)

    def forms_means(self, dtype: torch.dtype) -> bool:
        """Says whether torch asks for a mean of gradients of a dtype."""
        return dtype in (torch.float32, torch.bfloat16) and not self.sums


OWN = CustomComms()


def sent_by(comm: Comm, channel: Group, process_group: ProcessGroup) -> Group:
    """Returns what gathers or reduces by this in place of a channel."""
    return cast("Group", _CustomGroup(channel, comm, process_group))


@final
class _CustomGroup:
    """A unit's ranks, whose gathers or reductions are the user's; all else is the channel's."""

    def __init__(self, channel: Group, comm: Comm, process_group: ProcessGroup) -> None:
        self._channel, self._comm, self._process_group = channel, comm, process_group
        self.exchanges = False

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._channel, name)

    @not_compiled
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False, label: str = "", **_: bool
    ) -> Work:
        full, rank = self._like(output), self._channel.rank
        own = full[rank * shard.numel() : (rank + 1) * shard.numel()].copy_(shard)
        sent = self._comm(output_tensor=full, input_tensor=own, group=self._process_group, async_op=async_op)
        work = WorkThen(DONE if sent is None else _OfTorch(sent), lambda: output.copy_(full))
        if not async_op:
            work.wait()
        return work

    @not_compiled
    def reduce_scatter_into(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Reduces as :meth:`Group.reduce_scatter_into`; at once, as torch calls it: it may add up what arrives."""
        given, result = self._like(input).copy_(input), self._like(shard)
        # names are the same
        sent = self._comm(
            output_tensor=result,
            input_tensor=given,
            group=self._process_group,
            op=getattr(torch.distributed.ReduceOp, op.name),
        )
        if sent is not None:
            sent.wait()
        shard.copy_(result)
        return DONE

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._comm.allocate((tensor.numel(),), dtype=tensor.dtype, device=tensor.device).view(-1)


@final
class _OfTorch(Work):
    __slots__ = ("_work",)

    def __init__(self, work: TorchsWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def is_done(self) -> bool:
        return self._work.is_completed()


# ------------------------------------------------------------ gradients of a unit
# Gradients in flight: for each original parameter, whether this rank had a gradient; whether it had those of all
# trainable ones; this rank's part, [S], [S + F], or [S + flags of this rank]; and what to wait for, if anything.
Reduction = tuple[list[bool], bool, torch.Tensor, Work | None]
# Ranks that share flat parameters (their channel for gradients); how gradients travel; the sum over ranks is divided by
# the first before and by the second after it is formed; who sends them.
Terms = tuple[Group, ReducePolicy, tuple[float, float], CustomComms]
# A flat parameter in a pack: the number of its first original parameter there, where its shard begins in a rank's part,
# and which of its original parameters, by number in it, have something on this rank.
_Part = tuple[FlatParam, int, int, Sequence[int]]


def packed_dtype(flat: FlatParam, reduce: ReducePolicy) -> torch.dtype:
    own = flat.compute_dtype
    return reduce.dtype if reduce.dtype is not None and own.is_floating_point else own


@functools.lru_cache(maxsize=256)  # a model has many units of the same shapes
def _form_for(
    layouts: tuple[ShardLayout, ...],
    trainable: tuple[bool, ...],
    by_all: bool,
    itemsize: int | None,
    block: int | None,
) -> tuple[PackedForm, list[tuple[int, int]]]:
    """Returns where gradients and flags lie, and of each layout the number of its first item and where its part begins.

    Args:
        by_all: all ranks hear which ones have a gradient, not only those with a part.
        itemsize: of the memory that is written to, if it is.
        block: of so many numbers, in which they travel.
    """
    step = block or (1 if itemsize is None else alignment(itemsize))
    places, pieces, first, size = list[tuple[int, int]](), list[Piece](), 0, 0
    for layout in layouts:
        size = rounded_up(size, step)
        places.append((first, size))
        for p in layout.pieces():
            if trainable[first + p.item]:
                pieces.append(p._replace(item=first + p.item, offset=size + p.offset) if first else p)
        first, size = first + len(layout.numels), size + layout.shard_numel
    if block is not None:  # flags are in blocks of their own
        size = rounded_up(size, step)
    flagged = [k for k, trains in enumerate(trainable) if trains and by_all]
    sizes = [size] * layouts[0].world_size
    return PackedForm(pieces, sizes, even=True, step=step, flagged=flagged), places


class GradientPack(ABC):
    """Packs, reduces and hands over the gradients of one flat parameter, or of several that travel as one message.

    Args:
        flats: whose original parameters' gradients these are.
        terms: on which they are reduced.
        blocks: in which they travel, within the group or between replicas; None: as they are.

    Attributes:
        dtype: in which gradients travel.
        trainable: for each original parameter, whether it is.
        trains: any is.
        part_numel: numel of this rank's part of what is reduced.
        replicas: average the results; None where this rank alone holds the shard.
        hook: gets the results, with flags behind them, and changes them in place.
        in_flight: what was sent and not received.
    """

    def __init__(self, flats: Sequence[FlatParam], terms: Terms, blocks: BlockFormat | None = None) -> None:
        flat = self._flat = flats[0]
        self._flats, self._terms = flats, terms
        self._more = f" and {len(flats) - 1} more" if len(flats) > 1 else ""
        group, reduce, divisors, comms = terms
        self._group = group
        if comms.scatter is not None:
            self._group = sent_by(comms.scatter, group, comms.process_group)
        self.hook: Hook | None = comms.hook
        self._dtype = self.dtype = packed_dtype(flat, reduce)
        self._device = flat.compute_device
        # K of [Note: fixed order], 0 without one
        self._microbatches = 0 if reduce.order is None else microbatches(reduce, group.world_size)
        if self._microbatches:
            divisors = 1.0, 1.0
        before, after = divisors if group.world_size > 1 else (1.0, divisors[0] * divisors[1])
        if comms.scatter is not None and comms.sums:
            before, after = 1.0, before * after
        forms_means = has_mean if comms.scatter is None else comms.forms_means
        is_mean = not self._microbatches and before * after == group.world_size and forms_means(self._dtype)
        self._op = ReduceOp.AVG if is_mean else ReduceOp.SUM
        self._before, self._after = (1.0, 1.0) if is_mean else (before, after)
        self._gradient_class = flat.gradient_class
        self.in_flight: Reduction | None = None
        self.replicas: Group | CompressedAllReduce | None = None
        self._originals = flat.originals if len(flats) == 1 else [m for f in flats for m in f.originals]
        self.trainable = [trains for f in flats for trains in f.trainable]
        self.trains = True in self.trainable
        self._split = [(k, m) for k, m in enumerate(self._originals) if isinstance(m, SplitParameter)]
        self._in_blocks = blocks is not None
        itemsize = self._dtype.itemsize if group.backend.has_storage else None
        self._form, places = _form_for(
            tuple(map(_layout_of, flats)),
            tuple(self.trainable),
            flat.shards is not None or group.backend.has_storage,
            itemsize,
            None if blocks is None else blocks.numel,
        )
        self.part_numel = self._form.sizes[group.rank]
        self._parts: list[_Part] = []
        here = [p.item for p in self._form.pieces if p.rank == group.rank]
        self._in_runs: list[tuple[int, ShardLayout]] = []
        for f, (first, start) in zip(flats, places, strict=True):
            own = range(first, first + len(f.originals))
            items = here if len(flats) == 1 else [k - first for k in here if k in own]
            self._parts.append((f, first, start, items))
            if f.layout.runs > 1:
                self._in_runs += [(first + k, one) for k, one in f.layout.blocks if one.runs > 1]
        self._like = torch.empty(0, dtype=self._dtype, device=self._device)
        self._lay_out()

    @abstractmethod
    def _lay_out(self) -> None:
        """Makes what packs gradients in this form."""

    @property
    def nbytes(self) -> int:
        """Returns the bytes that are packed, of all ranks' parts."""
        return self.part_numel * self._group.world_size * self._dtype.itemsize

    # ------------------------------------------------------------ sending
    def take(self, kept: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the original parameters' gradients, which these have no longer.

        Args:
            kept: those of earlier backwards that are kept elsewhere, by number of the original parameter.
        """
        with as_tensors():
            gradients = list(map(_grad_of, self._originals))
            for m in self._originals:
                m.param.grad = None
        for number, earlier in kept.items():
            last = gradients[number]
            gradients[number] = earlier if last is None else earlier.add_(last)
        for number, original in self._split:
            gradient: Tree = gradients[number]
            gradients[number] = None if gradient is None else original.local_gradient(gradient)
        for number, one in self._in_runs:
            if (whole := gradients[number]) is not None:
                gradients[number] = rank_by_rank(whole.to_dense(), one)
        return gradients

    @abstractmethod
    def reduce(self, gradients: list[torch.Tensor | None]) -> Reduction | None:
        """Starts their reduction (collective); first gives their own memory back. None: nothing to do."""

    def _scatter(self, packed: torch.Tensor, had: list[bool], had_all: bool) -> Reduction:
        label = f"gradients of {self._flat.label}{self._more}"
        if self._microbatches:
            result, work = exchange(self._group, packed, None, self._microbatches, label)
            return had, had_all, result, work
        result = packed.new_empty(packed.numel() // self._group.world_size)
        if self._before != 1.0:
            packed.mul_(1.0 / self._before)
        if self._group.world_size == 1:  # it is for replicas
            return had, had_all, result.copy_(packed), DONE
        work = self._group.reduce_scatter_into(result, packed, op=self._op, async_op=True, label=label)
        return had, had_all, result, work

    # ------------------------------------------------------------ receiving
    def is_done(self) -> bool:
        """Says whether :meth:`receive` would not wait."""
        return self.in_flight is None or (work := self.in_flight[3]) is None or work.is_done()

    def receive(self) -> None:
        """Waits for the reduction, and adds the result, averaged over replicas too, to the shards' gradients."""
        if self.in_flight is None:
            self._forget_zeros(self._flat, self._flat.unused.originals)
            return
        had, had_all, result, work = self.in_flight
        self.in_flight = None
        if work is not None:
            for flat in self._flats:  # the first one waits; traces show the others, too
                with flat.ranges.reduce_wait():
                    work.wait()
            self._arrived()
        replicas = self.replicas
        if replicas is not None:
            result = self._average(result, replicas)
        if self._after != 1.0:
            result.mul_(1.0 / self._after)
        if self.hook is not None:
            self.hook(result)
        if not had_all:
            had = self._anywhere(had, result)
        ranks = ranks_of(self._group, replicas) if self._microbatches else 1
        parts = list(contributions(result, ranks)) if ranks > 1 else []
        for part in self._parts:
            flat, first, _, _ = part
            some = had if len(self._parts) == 1 else had[first : first + len(flat.originals)]
            if parts:
                self._arrive_in_order(part, some, parts, had_all)
            elif flat.store.landing is not None:
                self._arrive(part, some, result, had_all)
            else:  # as :meth:`_arrive`, which would be a call
                self._give(part, some, had_all, result)

    def _arrive(self, part: _Part, had: list[bool], result: torch.Tensor, had_all: bool) -> None:
        """Gives a shard the mean; some rank ``had`` these gradients, as far as is known."""
        flat, _, start, _ = part
        landing = flat.store.landing
        if landing is not None and result.device.type == self._device.type:
            size = flat.layout.shard_numel
            own = result if result.numel() == size else result[start : start + size]
            landing.start(own, partial(self._give, part, had, had_all))
        else:
            self._give(part, had, had_all, result)

    def _arrive_in_order(self, part: _Part, had: list[bool], each: list[torch.Tensor], had_all: bool) -> None:
        """Gives a shard each of these after the one before; see :meth:`_arrive`."""
        flat = part[0]
        listed = [listing.param for listing in flat.listings]
        hooked = [p for p in listed if p._backward_hooks or p._post_accumulate_grad_hooks]
        there = [p for p in listed if p.grad is not None]
        total = flat.param.grad if len(there) == len(listed) else None
        if not hooked and (total is not None or not there) and self._group.backend.has_storage:
            rest = each[:-1] if there else each[1:]
            with as_plain():
                total = self._own(part, each[0]) if total is None else total
                for one in rest:
                    total.add_(self._own(part, one).view(total.shape))
            each = each[-1:] if there else [total]
        for one in each:  # hooks see each of them
            self._arrive(part, had, one, had_all)

    def forget(self) -> None:
        """Waits for the reduction of a backward that died, and forgets the result."""
        reduction, self.in_flight = self.in_flight, None
        if reduction is not None and (work := reduction[3]) is not None:
            work.wait()
            self._arrived()

    def _arrived(self) -> None:  # noqa: B027 - where it is not a buffer of ours, nobody has it any more
        """Gives back what was sent."""

    def _give(self, part: _Part, had: list[bool], had_all: bool, result: torch.Tensor) -> None:
        """Notes which original parameters had no gradient on any rank, and adds to the shard's if any here had one."""
        flat, here = part[0], part[3] or range(len(had))
        trains = list(map(_requires_grad, flat.listings))
        if False in trains:  # frozen since forward: autograd gives such parameters nothing
            had = [h and t for h, t in zip(had, cycle(trains))]
        if flat.shards is not None:
            flat.shards.hand_over(self._own(part, result), had, self._gradient_class)
            return
        flat.unused.note(had, repeat(flat.param.grad is None))
        # hooks, which may step an optimizer, are called on all ranks or none
        if True in (had if flat.param._post_accumulate_grad_hooks else map(had.__getitem__, here)):
            add_gradient(flat.param, self._own(part, result), self._gradient_class, is_last=True)
        else:
            if type(flat.param) is ShardedFlatParameter:
                flat.param.__class__ = UnusedShard
            self._forget_zeros(flat, [flat.unused.originals[i] for i in here])

    def _anywhere(self, had: list[bool], result: torch.Tensor) -> list[bool]:
        """Tells which original parameters had a gradient on some rank, as far as this one hears of it."""
        return had

    def _own(self, part: _Part, result: torch.Tensor) -> torch.Tensor:
        """Returns a shard's gradient [S] in what came, in the shard's dtype and on its device."""
        flat, _, start, _ = part
        param, size = flat.param, flat.layout.shard_numel
        gradient = result if result.numel() == size else result[start : start + size]
        if gradient.dtype != param.dtype or gradient.device != param.device:
            gradient = gradient.to(device=param.device, dtype=param.dtype)
        return gradient

    def forget_errors(self) -> None:
        """Drops what compression has left out so far."""
        if isinstance(self.replicas, CompressedAllReduce):
            self.replicas.forget_errors()

    def clear_unused(self, listing: Registered) -> None:
        """Notes that a registered parameter's gradient is new: none of its original parameters has had one yet."""
        unused = listing.flat.unused
        if listing is listing.flat:
            unused.clear(None)
        else:
            unused.originals[listing.first] = True

    def _forget_zeros(self, flat: FlatParam, unused: Sequence[bool]) -> None:
        """Drops a shard's gradient where it is zeros that stand for nothing; see :class:`LocalGradients`."""
        if False not in unused:
            flat.param.grad = None

    def _average(self, result: torch.Tensor, replicas: Group | CompressedAllReduce) -> torch.Tensor:
        label = f"gradients of {self._flat.label}"
        if self._microbatches and isinstance(replicas, Group):
            everything = result.new_empty(replicas.world_size * result.numel())  # sums are another order's
            with self._flat.ranges.all_reduce():
                replicas.all_gather_into(everything, result, label=label).wait()
            return everything
        is_mean = has_mean(result.dtype)
        if not is_mean:
            result.mul_(1.0 / replicas.world_size)
        with self._flat.ranges.all_reduce():
            replicas.all_reduce(result, op=ReduceOp.AVG if is_mean else ReduceOp.SUM, label=label).wait()
        return result


class StoredPack(GradientPack):
    """Packs into a buffer [W * (S + F)] whose memory exists while it is in use."""

    def _lay_out(self) -> None:
        self._packed = torch.empty(self._form.starts[-1], dtype=self._dtype, device=self._device)
        shapes = list(map(_shape_of, self._originals))
        mean_over = self._group if self._op is ReduceOp.AVG else None
        self._pack = WrittenPack(self._form, self._packed, shapes, None, self._in_blocks, mean_over)
        self._group.backend.release_storage(self._packed)

    def reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = list(map(is_not, gradients, repeat(None)))
        self._group.backend.take_storage(self._packed)
        had_all = False not in compress(had, self.trainable)
        kept = self._pack.write(gradients, None if had_all else had)
        gradients.clear()
        if self._pack.exchanges:
            label = f"gradients of {self._flat.label}{self._more}"
            return had, had_all, *self._pack.exchange(self._group, kept, label)
        return self._scatter(self._packed, had, had_all)

    def _arrived(self) -> None:
        self._group.backend.release_storage(self._packed)

    def _anywhere(self, had: list[bool], result: torch.Tensor) -> list[bool]:
        return self._form.anywhere(had, result, self._group.rank)

    @property
    def joins(self) -> object:
        """Returns what is equal for packs that can travel as one message."""
        how = self._op, self._before, self._after, self._microbatches
        return self._group, self._dtype, self._device, *how, self._flat.shards is None

    def joined(self, others: Sequence[StoredPack]) -> StoredPack:
        """Returns the pack of one message in place of this one and others, whose ``joins`` are equal."""
        return StoredPack([pack._flat for pack in (self, *others)], self._terms)


@final
class CompressedPack(StoredPack):
    """Packs as :class:`StoredPack`, whose buffer [W * (S + F)] is given back as soon as its blocks are made."""

    def __init__(self, flats: Sequence[FlatParam], terms: Terms, blocks: BlockFormat) -> None:
        super().__init__(flats, terms, blocks)
        group, reduce, divisors, _ = terms
        self._after = divisors[0] * divisors[1]  # sums are of fp32
        self._exchange = CompressedReduceScatter(group, blocks, self._form.sizes, reduce.error_feedback)

    def _scatter(self, packed: torch.Tensor, had: list[bool], had_all: bool) -> Reduction:
        result, work = self._exchange.start(packed, f"gradients of {self._flat.label}", complete=had_all)
        self._group.backend.release_storage(packed)
        return had, had_all, result, work

    def _arrived(self) -> None:
        """Does nothing: it was given back."""

    def forget_errors(self) -> None:
        self._exchange.feedback.forget()


@final
class LazyPack(GradientPack):
    """Packs by concatenation, without writing into parts of a tensor: [W * S], or [W * (S + F)] with flags.

    Flags are there if a gradient is missing. Another rank that misses none sends none; the two run different programs
    then, and are out of step. Which original parameters had one is not known here, but data: see
    :class:`~.originals.Unused`.
    """

    def _lay_out(self) -> None:
        self._pack = JoinedPack(self._form, self._flat.layout.numels)

    def reduce(self, gradients: list[torch.Tensor | None]) -> Reduction | None:
        had = list(map(is_not, gradients, repeat(None)))
        if True not in had:  # on no rank, or they are out of step
            return None
        had_all = False not in compress(had, self.trainable)
        packed = self._pack.join(gradients, None if had_all else had, self._like)
        gradients.clear()
        return self._scatter(packed, had, had_all)

    def _give(self, part: _Part, had: list[bool], had_all: bool, result: torch.Tensor) -> None:
        """Notes as :meth:`GradientPack._give` does, but elements, and as data."""
        flat, used = self._flat, None
        if not flat.param.requires_grad:
            return  # frozen since forward
        if not had_all or False in self.trainable:
            rank = self._group.rank
            flags = result.new_ones(self._form.flags[rank]) if had_all else result[flat.layout.shard_numel :]
            used = self._pack.used_elements(flags, rank)
        flat.unused.note_elements(used, had, flat.param.grad is None)
        add_gradient(flat.param, self._own(part, result), self._gradient_class, is_last=True)

    def clear_unused(self, listing: Registered) -> None:
        """Clears as :meth:`GradientPack.clear_unused` does, but elements."""
        size = self._flat.layout.shard_numel
        self._flat.unused.clear(torch.zeros(size, dtype=torch.bool, device=self._device))  # no transfer

    def _own(self, part: _Part, result: torch.Tensor) -> torch.Tensor:
        return super()._own(part, result).clone()  # else the tensor that it is a view of lives on beside it


@final
class WholePack(GradientPack):
    """Nothing is sent."""

    def _lay_out(self) -> None:
        self._pack = JoinedPack(self._form, self._flat.layout.numels)
        self.part_numel = sum(self._form.first_flag)  # no flags are sent

    def reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = list(map(is_not, gradients, repeat(None)))
        had_all = False not in compress(had, self.trainable)
        joined = self._pack.join(gradients, None, self._like)
        if self._microbatches:
            joined.div_(self._microbatches).add_(0.0)  # see [Note: fixed order]
        return had, had_all, joined, None


def pack_for(
    flat: FlatParam,
    replicas: Group | None,
    reduce: ReducePolicy,
    divisors: tuple[float, float],
    comms: CustomComms = OWN,
) -> GradientPack:
    """Returns what reduces gradients to where the shard is now; see :class:`GradientPack`.

    Compressed is what crosses hosts: what replicas exchange, or where there are none what the group does.
    """
    group = flat.group.channel("gradients")
    has_replicas = replicas is not None and replicas.world_size > 1
    blocks = None
    if reduce.order is not None:
        reduce = replace(reduce, microbatches=microbatches(reduce, ranks_of(group, replicas)))
    if reduce.compression is not None and (has_replicas or group.world_size > 1):
        blocks = format_for(reduce.compression, flat.layout.shard_numel, packed_dtype(flat, reduce))
    terms = group, reduce, divisors, comms
    if group.world_size > 1 and not has_replicas and blocks is not None:
        pack: GradientPack = CompressedPack([flat], terms, blocks)
    elif group.world_size == 1 and not has_replicas and comms.hook is None:
        pack = WholePack([flat], terms, blocks)
    else:  # also of one rank: replicas, also those of a hook, tell each other by flags who had which gradient
        pack = (StoredPack if group.backend.has_storage else LazyPack)([flat], terms, blocks)
    pack.replicas = between = None if replicas is None else replicas.channel("parameters")
    if has_replicas and blocks is not None and between is not None:
        pack.replicas = CompressedAllReduce(between, blocks, pack.part_numel, reduce.error_feedback)
    return pack


@functools.cache
def predivide_factor(world_size: int) -> int:
    """Returns the power of two next to the root of the world size that divides it (fairscale's choice)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor


# ------------------------------------------------------------ gradients that are not reduced yet
class LocalGradients:
    """Gradients of this rank's own that ``no_sync`` keeps for one registered parameter.

    After a backward inside ``no_sync`` the original parameters hold this rank's gradients, and the registered
    parameter, the shard, has nothing new. It gets a gradient of zeros all the same: ``optimizer.zero_grad()`` in any
    form changes that one, and so says that the original parameters' gradients are to be forgotten too.

    Gradients of a narrower dtype than the one in which they travel are kept in that one, or what is small would be lost
    to what has added up; autograd wants those of a parameter in the parameter's dtype, so they are kept here.
    """

    def __init__(self, listing: Registered) -> None:
        self._listing = listing
        self._standing = StandingGradient()
        if isinstance(listing, RegisteredShard):
            listing.standing = self._standing
        self._wide: dict[int, torch.Tensor] = {}  # of original parameters, by number in the listing

    def note(self, pack: GradientPack) -> None:
        """Notes that a backward inside ``no_sync`` has ended; ``pack`` would have reduced the gradients."""
        listing = self._listing
        self.widen(pack.dtype)
        if not self.are_there():
            return
        if listing.param.grad is None:
            listing.param.grad = torch.zeros_like(listing.param, requires_grad=False)
            pack.clear_unused(listing)
        self._standing.stand(listing.param, listing.param.grad)
        refuse_steps.note(self)

    @torch.no_grad()
    def widen(self, dtype: torch.dtype) -> None:
        """Adds the original parameters' gradients to those that are kept in a wider dtype, if this one is wider."""
        for number, original in enumerate(self._listing.originals):
            with as_tensors():
                gradient = original.param.grad
                if gradient is None or not gradient.is_floating_point() or gradient.is_sparse:
                    continue
                if dtype.itemsize <= gradient.dtype.itemsize:
                    return
                original.param.grad = None
            if (kept := self._wide.get(number)) is None:
                self._wide[number] = gradient.to(dtype)
            else:
                kept.add_(gradient)

    def take(self) -> dict[int, torch.Tensor]:
        """Returns what is kept in a wider dtype, by number of the original parameter in the flat parameter."""
        wide, self._wide = self._wide, {}
        return {self._listing.first + number: gradient for number, gradient in wide.items()}

    def are_there(self) -> bool:
        """Says whether any original parameter has a gradient of this rank's own."""
        with as_tensors():
            return bool(self._wide) or any(m.param.grad is not None for m in self._listing.originals)

    def drop(self) -> None:
        self._wide.clear()
        with as_tensors():
            for m in self._listing.originals:
                m.param.grad = None

    def are_waiting(self) -> bool:
        """Says whether gradients of this rank wait for a reduction, and nobody has cleared them."""
        return not self._standing.was_touched(self._listing.param) and self.are_there()

    def check_step(self, stepped: set[int]) -> None:
        """Raises LifecycleError if the shard's id is among these: such a step would leave the gradients out."""
        listing = self._listing
        # WholeParameters steps what has all of the shard's rows
        if not stepped.isdisjoint((id(listing.param), id(listing.flat.param))) and self.are_waiting():
            raise LifecycleError(
                f"rank {listing.group.ranks[listing.group.rank]}: step() comes after a backward inside of no_sync(): "
                f"gradients of {listing.label} are this rank's own, were not reduced, and the step "
                "would leave them out. Run the last backward before a step outside of no_sync(), or call zero_grad()"
            )

    def forget_if_cleared(self) -> None:
        """Clears the original parameters' gradients, before anything is added, if the shard's was cleared."""
        if not self._standing.was_touched(self._listing.param):
            return
        self._standing.forget()
        if not self.are_there():
            return  # they were reduced meanwhile
        now = self._listing.param.grad
        are_kept = None if now is None else now.any()
        if are_kept is not None and not self._listing.group.backend.has_storage:
            with as_tensors():  # as data: to read it would run what was recorded
                for m in self._listing.originals:
                    g = m.param.grad
                    m.param.grad = None if g is None else torch.where(are_kept, g, 0)
        elif are_kept is None or not bool(are_kept):
            self.drop()


class RefuseSteps:
    """Takes part in steps while gradients wait for a reduction, or for other micro-batches.

    What is noted tells whether they ``are_waiting()``, and its ``check_step(ids)`` raises if those of parameters do.
    """

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[Tree] = weakref.WeakSet()
        self._lock = threading.Lock()  # ranks may be threads of one process

    def note(self, local: object) -> None:
        """Notes that its gradients may wait."""
        take_part(self, refuses=True)
        with self._lock:
            self._waiting.add(local)

    def before(self, optimizer: Optimizer) -> None:
        if not self._waiting:
            return
        stepped = {id(changed_by_steps(p)) for group in optimizer.param_groups for p in group["params"]}
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.difference_update([local for local in waiting if not local.are_waiting()])
        # a block that gradients wait for says more than what keeps them
        for local in sorted(waiting, key=lambda each: isinstance(each, LocalGradients)):
            local.check_step(stepped)

    def after(self, optimizer: Optimizer) -> None:
        """Does nothing: nothing was done before."""


refuse_steps = RefuseSteps()


# ------------------------------------------------------------ the unit
class Unit:
    """The flat parameters of one wrapped module.

    Attributes:
        comms: messages that are sent otherwise.
        name: path of the wrapper in the root module.
        ranges: what it does, in traces.
        flats: flat parameters that this unit owns.
        borrowed: those of other units with weights that this unit's module uses too.
        needs: both.
        keeps_between: a mesh of ranks keeps its values from forward to backward.
        keep_after_forward: stays gathered between forward and backward.
        keep_after_backward: stays gathered between backward and the next forward, unless shards change.
        keeps_frozen: what it has of parameters that are not trained stays gathered, unless shards change.
        accumulates: its gradients stay this rank's own, as in ``no_sync``.
        doors: how many modules are called, which are one unit together.
        left: of these, calls that the forward in progress has left.
        gathered_at: version of the shards whose values may be used longer than for a step; None where none may.
        engine: runs the unit; the root's.
        enter_backward: called where backward reaches an output of the module, with the gradient.
        is_held: gathered on behalf of this unit.
        fired: which of its trainable parameters the backward in progress has given a gradient.
        reduced: its gradients were sent in this backward.
        packs: reduce the gradients of each of its flat parameters; made with the engine.
        sent: those of them that have something to send.
        position: place in the order of backward; -1 where it has none.
        is_reached: backward may go through its last forward on this rank, as far as forward tells.
        goes_backward: it may on some rank: the unit is gathered for backward.
        began: what autograd counted when its last forward began.
        is_undecided: ranks have not heard from each other whether it is gathered for backward.
        has_frozen: some of what it needs is not trainable.
        open_calls: with frozen parameters, that backward is inside of: it needs these.
        keeps_local: there may be gradients that ``no_sync`` keeps.
        task: the backward that has reached its outputs last.
        backwards: of a root's unit, how many have gone through it.
    """

    comms: CustomComms = OWN

    def __init__(
        self,
        flats: Sequence[FlatParam],
        borrowed: Sequence[FlatParam],
        keep_after_forward: bool,
        reduce: ReducePolicy,
        divisors: tuple[float, float],
        replicas: Group | None = None,
    ) -> None:
        self.name = ""
        self.ranges: Ranges = UNNAMED
        self.keep_after_forward = keep_after_forward
        self.keep_after_backward = self.accumulates = self.keeps_frozen = False
        self.doors, self.left = 1, 0
        self.gathered_at: int | None = None
        self.reduce = reduce
        self.divisors = divisors
        self.replicas = replicas
        self.engine: Engine | None = None
        self.enter_backward: Callable[[torch.Tensor], None]
        self.is_held = self.reduced = self.is_undecided = self.keeps_local = False
        self.position = -1
        self.waiting = self.began = 0
        self.task = NO_BACKWARD
        self._hooks = GradientHooks(
            "a hook for when a parameter has got its gradient can't be registered on a parameter that FSDP has "
            "sharded: it keeps no gradient of its own. Register it on the shards that the FSDP module's parameters() "
            "lists, whose gradients are the mean over ranks"
        )
        self.packs: list[GradientPack] = []
        self.fired: list[bool] = []
        self.sent: list[GradientPack] = []
        self._local: list[list[LocalGradients]] = []  # of each, as soon as there are any
        self.is_reached = self.goes_backward = True
        self.open_calls = self.backwards = 0
        self.take(flats, borrowed)

    def take(self, flats: Sequence[FlatParam], borrowed: Sequence[FlatParam]) -> None:
        """Makes these what it owns, and what it uses of others; nobody has run it yet."""
        self.flats, self.borrowed = list(flats), list(borrowed)
        self.needs = [*self.flats, *self.borrowed]
        self.keeps_between = self._is_lazy = False
        for flat in self.needs:
            self._is_lazy |= not flat.group.backend.has_storage
        self._trained: list[list[bool]] = []
        for flat in self.flats:
            self._trained.append(list(map(_requires_grad, flat.listings)))
            self.keeps_between |= flat.post_forward_mesh is not None
        self.attach()

    def divide(self, before: float, after: float) -> None:
        """Divides gradients by the one before and by the other after their sum over ranks."""
        refuse_other(self.reduce, "other divisors than the number of micro-batches")
        self.divisors = before, after
        self.attach()

    def send_through(self, comms: CustomComms) -> None:
        """Sends its messages so from now on; between steps."""
        self.comms = comms
        if self.engine is not None and comms.are_custom:
            self.engine.needs_one_order = True
        over = None
        if comms.gather is not None and self.flats:  # one for all of them, which travel together
            channel = self.flats[0].group.channel("parameters")
            over = sent_by(comms.gather, channel, comms.process_group)
        for flat in self.flats:
            flat.gathers_over = over
            flat.store.send_over(over)
        self.attach()

    # ------------------------------------------------------------ what is trainable
    def attach(self) -> None:
        """Listens to the gradients of the original parameters that are trainable now."""
        if self.fired:
            self._hooks.remove()
        self.fired, self.has_frozen = [], False
        with as_tensors():
            for flat in self.borrowed:
                self.has_frozen = self.has_frozen or False in map(_requires_grad, flat.originals)
            for flat in self.flats:
                # all ranks connect it here, whichever root each of them calls first
                flat.group.channel("gradients")
                flat.trainable = trainable = list(map(_requires_grad, flat.originals))
                flat.trains, flat.reduce = True in trainable, self.reduce
                self.has_frozen = self.has_frozen or False in trainable
                for number in compress(range(len(trainable)), trainable):
                    after = self._after(len(self.fired), flat, number)
                    self._hooks.attach(flat.originals[number].param, None, after)
                    self.fired.append(False)
        self.waiting = len(self.fired)
        if self.engine is not None:
            self.run_by(self.engine)

    def run_by(self, engine: Engine) -> None:
        """Makes what reduces its gradients, which :attr:`engine` begins; again where it has changed."""
        self.engine, self.enter_backward = engine, partial(engine.reach, self)
        engine.trained = ""  # it may be another part now
        terms = self.replicas, self.reduce, self.divisors, self.comms
        # for training, also where the first forward is an evaluation
        with torch.inference_mode(False):
            self.packs = [pack_for(flat, *terms) for flat in self.flats]
        self.sent = [pack for pack in self.packs if pack.trains]

    def notice_trainable(self) -> bool:
        """Follows what was frozen or unfrozen, in the listed parameters or the original ones; whether any was."""
        changed = False
        for flat, trained in zip(self.flats, self._trained, strict=True):
            now = list(map(_requires_grad, flat.listings))
            with as_tensors():
                trainable = list(map(_requires_grad, flat.originals))
            if now == trained and trainable == flat.trainable:
                continue
            for k, listing in enumerate(flat.listings):
                was_told = listing.is_told and trainable[listing.first] != flat.trainable[listing.first]
                trains = True in trainable[listing.first : listing.first + len(listing.originals)]
                if now[k] != trained[k] or was_told:  # it is newer
                    for original in listing.originals:
                        original.param.requires_grad_(now[k])
                elif trains != now[k]:
                    listing.param.requires_grad = now[k] = trains  # of this alone, unlike requires_grad_
            trained[:], changed = now, True
        if changed:
            self.attach()
        return changed

    def _after(self, index: int, flat: FlatParam, number: int) -> Callable[[torch.Tensor], None]:
        # one closure a parameter: these run for every gradient
        def after(_: torch.Tensor) -> None:
            if (engine := self.engine) is None:
                name = name_of_original(flat.originals[number].param)
                raise LifecycleError(
                    f"rank {flat.group.rank}: backward reached parameter {name!r}, but the FSDP module that holds it "
                    "was never called; call the FSDP module, not what it wraps, or its shards get no gradients"
                )
            if flat.store.state is SUMMONED:
                raise backward_when_summoned(flat)
            if engine.state.task == NO_BACKWARD:
                engine.begin_backward(by_gradient=True)
            if not self.fired[index]:
                self.fired[index] = True
                self.waiting -= 1
                if self.waiting == 0:
                    if self.task in (NO_BACKWARD, current_backward()):
                        engine.complete(self)
                    else:  # a re-entrant checkpoint inside of the module: there may be another one
                        engine.deferred.append(self)

        return after

    # ------------------------------------------------------------ memory
    def start_gather(self, together: list[Store] | None = None) -> None:
        """Asks for the values of everything that the module needs.

        Args:
            together: gets the stores that are to be started, with those of other units; else they are started.
        """
        if self.is_held:
            return
        self.is_held = True
        self.gathered_at = self._version() if self.keep_after_backward or self.doors > 1 else None
        asked: list[Store] = [] if together is None else together
        after = self.engine.after if self.engine is not None else ()
        with self.ranges.gather():
            for flat in self.needs:
                if (store := flat.use()) is not None:
                    asked.append(store)
            if self.keeps_frozen:
                for flat in self.flats:
                    flat.keep()
            if together is not None:
                return
            if len(asked) == 1 and not self._is_lazy:
                asked[0].start(after)
            else:
                start_together(asked, after)

    def release(self, until_backward: bool = False) -> None:
        """Notes that the module does not need its values any more, or only in backward.

        Raises:
            LifecycleError: somebody wrote to them, which is lost with their memory.
        """
        if self.is_held:
            self.is_held = False
            with self.ranges.reshard():
                for flat in self.needs:
                    store = flat.store
                    store.users -= 1
                    if store.users <= 0:
                        store.release(until_backward)
            for flat in self.needs:
                if flat.written:
                    raise written_original(flat)

    def give_back_frozen(self, outdated: bool = False) -> None:
        """Frees frozen values that were kept; with ``outdated`` those that are not the shards' any more."""
        for flat in self.flats:
            if flat.kept_at is not None and (not outdated or flat.is_outdated):
                self.release()  # else it would be taken for gathered
                flat.drop()

    def is_current(self) -> bool:
        """Says whether what it holds is what the shards have."""
        return self.gathered_at == self._version() and all(
            flat.shards is None or flat.shards.are_views() for flat in self.needs
        )

    def _version(self) -> int:
        return sum(flat.version for flat in self.needs)

    def forget_between(self) -> None:
        """Keeps nothing between forward and backward any more."""
        for flat in self.flats:
            if flat.store.state is KEPT:
                flat.store.forget_kept()

    # ------------------------------------------------------------ backward
    def rename(self, paths: Sequence[str]) -> None:
        """Notes that the paths of its modules in the root module are known."""
        self.name = name = paths[0]
        group = self.group
        values = sum(f.layout.padded_numel * f.compute_dtype.itemsize for f in self.flats)
        gradients = sum(pack.nbytes for pack in self.sent)
        self.ranges = Ranges(
            name or "root", () if group is None else group.ranks, gather=values, reduce=gradients
        )
        for flat in self.flats:
            flat.ranges, flat.paths = self.ranges, list(paths)

    @property
    def small_bytes(self) -> int:
        """Counts the bytes of its values, gathered, where they can travel with those of other units; else -1."""
        if any(flat.store.joins is None or flat.is_borrowed or flat.on_gather for flat in self.needs):
            return -1
        return sum(flat.layout.padded_numel * flat.compute_dtype.itemsize for flat in self.needs)

    @property
    def group(self) -> Group | None:
        """Returns the ranks among which it is sharded; None where it needs no parameters."""
        return self.needs[0].group if self.needs else None

    @property
    def is_trainable(self) -> bool:
        """Says whether there is anything to reduce."""
        return bool(self.fired)

    def send(self, together: list[torch.Tensor | None] | None = None) -> None:
        """Starts the reduction of its gradients.

        Args:
            together: gets them, to be sent with those of other units; else they are sent.
        """
        self.reduced = True
        with self.ranges.reduce():
            for k, pack in enumerate(self.packs):
                if pack.trains:
                    kept: dict[int, torch.Tensor] = {}
                    for one in self._local[k] if self.keeps_local else ():
                        kept.update(one.take())
                    gradients = pack.take(kept)
                    if together is None:
                        pack.in_flight = pack.reduce(gradients)
                    else:
                        together += gradients
        self.keeps_local = False

    def forget_errors(self) -> None:
        """Drops what compression has left out of gradients so far."""
        for pack in self.packs:
            pack.forget_errors()

    def local_gradients(self) -> Iterator[tuple[LocalGradients, GradientPack]]:
        """Yields what ``no_sync`` keeps for each registered parameter, and what would reduce it."""
        self.keeps_local = True
        if not self._local:
            self._local = [[LocalGradients(listing) for listing in f.listings] for f in self.flats]
        for local, pack in zip(self._local, self.packs, strict=True):
            for one in local:
                yield one, pack

    def forget_if_cleared(self) -> None:
        """Discards what was cleared meanwhile, before a backward adds to what ``no_sync`` keeps."""
        for one in chain.from_iterable(self._local) if self.keeps_local else ():
            one.forget_if_cleared()

    def has_local_gradients(self) -> bool:
        """Says whether original parameters hold gradients of this rank that were not reduced."""
        if self.keeps_local:
            return any(one.are_there() for local in self._local for one in local)
        with as_tensors():
            originals = chain.from_iterable(map(_originals_of, self.flats))
            return any(map(is_not, map(_grad_of, originals), repeat(None)))  # of every unit in every backward

    def drop_local_gradients(self) -> None:
        for one, _ in self.local_gradients():
            one.drop()
        self.keeps_local = False

    def end_backward(self) -> None:
        """Gets ready for the next one."""
        if self.is_held and not self.keep_after_backward:
            self.release()
        if self.keeps_between:
            self.forget_between()
        self.reduced = False
        self.task = NO_BACKWARD
        self.open_calls = 0
        self.waiting = len(self.fired)
        self.fired[:] = [False] * self.waiting


def rounds_of(units: Sequence[Unit]) -> Rounds | None:
    """Counts the backwards of a step through these units, where the order of sums is fixed.

    Raises:
        ConfigurationError: it is not the same for all of them.
    """
    trained = [unit for unit in units if unit.flats]
    ranks = [ranks_of(u.flats[0].group, u.replicas) for u in trained]
    counts = {(microbatches(u.reduce, w), w) for u, w in zip(trained, ranks, strict=True)}
    if all(count == 0 for count, _ in counts):
        return None
    if len(counts) > 1:
        raise ConfigurationError(
            'order="fixed" and microbatches= have to be the same for all units of a model, over the same ranks: '
            f"there are {sorted(counts)} as (micro-batches, ranks)"
        )
    [(count, world_size)] = counts
    params = [listing.param for unit in trained for flat in unit.flats for listing in flat.listings]
    return Rounds(params, count, world_size)


ROW = 2**16  # bytes that one message brings for several units


class SmallUnits:
    """Units in a row whose gradients travel as one message; of them as of a :class:`Unit`, what the engine asks."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.flats = [flat for unit in units for flat in unit.flats]
        self.sent: Sequence[GradientPack] = ()
        self._packs: list[GradientPack] = []  # of the units, in place of which the joined one is
        self._joined: StoredPack | None = None

    @property
    def accumulates(self) -> bool:
        """Says whether all of them keep their gradients."""
        return all(unit.accumulates for unit in self.units)

    @property
    def waiting(self) -> int:
        """Counts the gradients that are missing of those that are to be sent."""
        return sum([unit.waiting for unit in self.units if not unit.accumulates])

    def send(self) -> None:
        """Starts the reduction of their gradients."""
        packs = [pack for unit in self.units for pack in unit.sent]
        if packs != self._packs:
            stored, kinds, _ = joinable(self.units)
            self._packs, self._joined = packs, stored[0].joined(stored[1:]) if len(kinds) == 1 else None
        units = [unit for unit in self.units if not unit.accumulates]
        if self._joined is None or len(units) < len(self.units):
            # one of them has got another kind since the plan was made, or keeps its gradients
            self.sent = [pack for unit in units for pack in unit.sent]
            for unit in units:
                unit.send()
            return
        gradients: list[torch.Tensor | None] = []
        for unit in units:
            unit.send(gradients)
        self.sent = (self._joined,)
        self._joined.in_flight = self._joined.reduce(gradients)


def joinable(units: Sequence[Unit]) -> tuple[list[StoredPack], set[object], int]:
    """Returns what reduces the gradients of these units, their kinds (one, if they can travel together), and bytes."""
    packs = [pack for unit in units for pack in unit.sent]
    stored = [pack for pack in packs if type(pack) is StoredPack]
    alone = len(stored) < len(packs) or any(
        unit.replicas is not None or unit.comms.hook is not None for unit in units
    )
    kinds = set() if alone else {pack.joins for pack in stored}
    return stored, kinds, sum([pack.nbytes for pack in stored])


def rows_of_small(units: Sequence[Unit]) -> list[Unit | SmallUnits]:
    """Returns units in order, those together whose gradients are small and can travel as one message."""
    found = [joinable([unit])[1:] for unit in units]
    kinds = [next(iter(kinds)) if len(kinds) == 1 else None for kinds, _ in found]
    rows = [[units[k] for k in row] for row in buckets_by_size([size for _, size in found], ROW, kinds)]
    return [row[0] if len(row) == 1 else SmallUnits(row) for row in rows]


class UnitCall:
    """One call of a module with frozen parameters.

    The gradients of such a module may all be there while its frozen parameters are still in use: it is needed until
    backward has left the call by all of its inputs. Without an input that needs a gradient, it is needed to the end:
    backward may go on to units below, or to what forward itself made a leaf. So it may where an input is a leaf, whose
    gradient autograd computes first; in a re-entrant checkpoint the end is that of the inner backward.
    """

    @not_compiled
    def __init__(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        needing = [t for t in inputs if t.requires_grad]
        self._unit, self._inputs, self._at_end = unit, len(needing), any(t.is_leaf for t in needing)
        self._waiting = 0  # inputs that the backward in progress has not left by
        self._task = NO_BACKWARD
        for t in needing:
            t.register_hook(self._left)

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor) -> None:
        """Notes that backward reached an output of the call."""
        task = current_backward()
        if task != self._task:  # there may be several backwards through one call
            self._task, self._waiting = task, self._inputs
            self._unit.open_calls += 1
        self._unit.enter_backward(gradient)

    @not_compiled
    def _left(self, _: torch.Tensor) -> None:
        self._waiting -= 1
        if self._waiting == 0 and self._task == current_backward():
            if not self._at_end:
                self._leave()
            elif (engine := self._unit.engine) is not None and engine.state.task != self._task:
                after_backward(self._leave)

    def _leave(self) -> None:
        unit = self._unit
        unit.open_calls -= 1
        if unit.open_calls == 0 and (unit.waiting == 0 or unit.reduced) and unit.engine is not None:
            unit.engine.leave(unit)
