"""Reduces the gradients of a flat parameter's original parameters to each rank's shard.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, cycle, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, final

import torch
from torch.optim import Optimizer

from ..backend import DONE, Group, ReduceOp, Work, WorkThen, not_compiled
from ..errors import LifecycleError
from ..layout import Piece, ShardLayout, alignment, rounded_up
from ..optimizers.shards import changed_by_steps, take_part
from ..policy import ReducePolicy
from ..reduction.compression import BlockFormat, CompressedAllReduce, CompressedReduceScatter, format_for
from ..reduction.ordered import contributions, exchange, microbatches, share
from ..reduction.packing import JoinedPack, PackedForm, WrittenPack, has_mean
from ..reduction.shard_gradients import StandingGradient, gradient_class
from ..torch_seams.tensors import as_plain
from ..types import ProcessGroup, Tree
from .flat_param import FlatParam, Registered, RegisteredShard, add_gradient
from .originals import SplitParameter, as_tensors
from .store import rank_by_rank

if TYPE_CHECKING:
    from torch.distributed import Work as TorchsWork

_grad_of, _requires_grad = attrgetter("param.grad"), attrgetter("param.requires_grad")
_shape_of, _layout_of = attrgetter("shape"), attrgetter("layout")


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
        """Whether any of it is sent, or changed, by somebody else."""
        return (self.gather, self.scatter, self.hook) != (None, None, None)

    def forms_means(self, dtype: torch.dtype) -> bool:
        """Whether torch asks for a mean of gradients of a dtype."""
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

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._channel, name)

    @not_compiled
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Gathers as :meth:`Group.all_gather_into`."""
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
        memory = self._comm.allocate((tensor.numel(),), dtype=tensor.dtype, device=tensor.device)
        return memory.view(-1)


@final
class _OfTorch(Work):
    """A work of torch's."""

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
    """Returns the dtype in which gradients are packed."""
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
        self._gradient_class = gradient_class(
            flat.group, "the FSDP root's clip_grad_norm_", True, in_order=self._microbatches > 0
        )
        self.in_flight: Reduction | None = None
        self.replicas: Group | CompressedAllReduce | None = None
        self._originals = flat.originals if len(flats) == 1 else [m for f in flats for m in f.originals]
        self.trainable = [trains for f in flats for trains in f.trainable]
        self.trains = True in self.trainable
        self._split: list[tuple[int, SplitParameter]] = []
        for k, m in enumerate(self._originals):
            if isinstance(m, SplitParameter):
                self._split.append((k, m))
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
        label = f"gradients of {self._flat.label}"
        if len(self._flats) > 1:
            label = f"{label} and {len(self._flats) - 1} more"
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
        """Whether :meth:`receive` would not wait."""
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
        ranks = self._group.world_size * (1 if replicas is None else replicas.world_size)
        parts = list(contributions(result, ranks)) if self._microbatches and ranks > 1 else []
        for part in self._parts:
            flat, first, _, _ = part
            some = had if len(self._parts) == 1 else had[first : first + len(flat.originals)]
            if parts:
                self._arrive_in_order(part, some, parts, had_all)
            elif flat.store.landing is not None:
                self._arrive(part, some, result, had_all)
            elif self._note(part, some, had_all, result):  # as :meth:`_arrive`, which would be a call
                add_gradient(flat.param, self._own(part, result), self._gradient_class, is_last=True)

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

    def _give(self, part: _Part, had: list[bool], had_all: bool, result: torch.Tensor) -> None:
        if self._note(part, had, had_all, result):
            add_gradient(part[0].param, self._own(part, result), self._gradient_class, is_last=True)

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

    def _note(self, part: _Part, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """Notes which original parameters had no gradient on any rank; whether any with a part here had one."""
        flat, here = part[0], part[3] or range(len(had))
        trains = list(map(_requires_grad, flat.listings))
        if False in trains:  # frozen since forward: autograd gives such parameters nothing
            had = [h and t for h, t in zip(had, cycle(trains))]
        if flat.shards is not None:
            flat.shards.hand_over(self._own(part, result), had, self._gradient_class)
            return False
        flat.unused.note(had, repeat(flat.param.grad is None))
        if True not in map(had.__getitem__, here):
            self._forget_zeros(flat, [flat.unused.originals[i] for i in here])
            return False
        return True

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
        if self._microbatches and isinstance(replicas, Group):
            # their sums are another order's
            everything = result.new_empty(replicas.world_size * result.numel())
            with self._flat.ranges.all_reduce():
                replicas.all_gather_into(everything, result, label=f"gradients of {self._flat.label}").wait()
            return everything
        is_mean = has_mean(result.dtype)
        if not is_mean:
            result.mul_(1.0 / replicas.world_size)
        with self._flat.ranges.all_reduce():
            replicas.all_reduce(
                result, op=ReduceOp.AVG if is_mean else ReduceOp.SUM, label=f"gradients of {self._flat.label}"
            ).wait()
        return result


class StoredPack(GradientPack):
    """Packs into a buffer [W * (S + F)] whose memory exists while it is in use."""

    def _lay_out(self) -> None:
        self._packed = torch.empty(self._form.starts[-1], dtype=self._dtype, device=self._device)
        shapes = list(map(_shape_of, self._originals))
        self._pack = WrittenPack(self._form, self._packed, shapes, in_blocks=self._in_blocks)
        self._group.backend.release_storage(self._packed)

    def reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = list(map(is_not, gradients, repeat(None)))
        self._group.backend.take_storage(self._packed)
        had_all = False not in compress(had, self.trainable)
        self._pack.write(gradients, None if had_all else had)
        gradients.clear()
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
        label = f"gradients of {self._flat.label}"
        result, work = self._exchange.start(packed, label, complete=had_all)
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

    def _note(self, part: _Part, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """Notes as :meth:`GradientPack._note` does, but elements, and as data."""
        flat, used = self._flat, None
        if not flat.param.requires_grad:
            return False  # frozen since forward
        if not had_all or False in self.trainable:
            rank = self._group.rank
            flags = result.new_ones(self._form.flags[rank]) if had_all else result[flat.layout.shard_numel :]
            used = self._pack.used_elements(flags, rank)
        flat.unused.note_elements(used, flat.param.grad is None)
        return True

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
            share(joined, self._microbatches)
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
    if replicas is not None and reduce.order is not None:
        reduce = replace(reduce, microbatches=microbatches(reduce, group.world_size * replicas.world_size))
    if reduce.compression is not None and (has_replicas or group.world_size > 1):
        blocks = format_for(reduce.compression, flat.layout.shard_numel, packed_dtype(flat, reduce))
    terms = group, reduce, divisors, comms
    if group.world_size > 1 and not has_replicas and blocks is not None:
        pack: GradientPack = CompressedPack([flat], terms, blocks)
    elif group.world_size == 1 and not has_replicas and comms.hook is None:
        pack = WholePack([flat], terms, blocks)
    else:  # also of one rank: replicas, also those of a hook, tell each other by flags who had which gradient
        pack = (StoredPack if group.backend.has_storage else LazyPack)([flat], terms, blocks)
    pack.replicas = replicas
    if has_replicas and blocks is not None and replicas is not None:
        pack.replicas = CompressedAllReduce(replicas, blocks, pack.part_numel, reduce.error_feedback)
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
            kept = self._wide.get(number)
            if kept is None:
                self._wide[number] = gradient.to(dtype)
            else:
                kept.add_(gradient)

    def take(self) -> dict[int, torch.Tensor]:
        """Returns what is kept in a wider dtype, by number of the original parameter in the flat parameter."""
        wide, self._wide = self._wide, {}
        return {self._listing.first + number: gradient for number, gradient in wide.items()}

    def are_there(self) -> bool:
        """Whether any original parameter has a gradient of this rank's own."""
        with as_tensors():
            return bool(self._wide) or any(m.param.grad is not None for m in self._listing.originals)

    def drop(self) -> None:
        """Discards them."""
        self._wide.clear()
        with as_tensors():
            for m in self._listing.originals:
                m.param.grad = None

    def are_waiting(self) -> bool:
        """Whether gradients of this rank wait for a reduction, and nobody has cleared them."""
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
