"""Reduces the gradients of a flat parameter's original parameters to each rank's shard.

Legend: W world size, S shard numel, F flags in one rank's part.

When a unit's gradients are there, they are packed ([Note: packed gradients] in ``reduction/packing.py``: rank by rank
its shard of the flat parameter, and a flag for each original parameter that lies there). Their own memory is given
back, and one reduce-scatter makes the part of this rank. Original parameters that no rank had a gradient for stay as
they are in the optimizer's step, as in a plain process (see ``optimizer_check.py``).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import final

import torch

from ..backend import DONE, Copy, Group, ReduceOp, Work
from ..layout import Piece, ShardLayout, alignment, rounded_up
from ..policy import ReducePolicy
from ..reduction.compression import BlockFormat, CompressedAllReduce, CompressedReduceScatter, format_for
from ..reduction.ordered import contributions, exchange, microbatches, share
from ..reduction.packing import JoinedPack, PackedForm, WrittenPack, has_mean
from ..reduction.shard_gradients import gradient_class
from ..torch_seams.tensor_facts import as_plain
from ..types import Tree
from .flat_param import FlatParam
from .flat_values import rank_by_rank
from .originals import SplitParameter, as_tensors
from .registered import Registered, add_gradient

_grad_of, _requires_grad = attrgetter("param.grad"), attrgetter("param.requires_grad")
_shape_of = attrgetter("shape")


# Gradients in flight: for each original parameter, whether this rank had a gradient; whether it had those of all
# trainable ones; this rank's part, [S], [S + F], or [S + flags of this rank]; and what to wait for, if anything.
Reduction = tuple[list[bool], bool, torch.Tensor, Work | None]


def packed_dtype(flat: FlatParam, reduce: ReducePolicy) -> torch.dtype:
    """Returns the dtype in which gradients are packed."""
    own = flat.compute_dtype
    return reduce.dtype if reduce.dtype is not None and own.is_floating_point else own


@functools.lru_cache(maxsize=256)  # a model has many units of the same shapes
def _form_for(
    layout: ShardLayout,
    trainable: tuple[bool, ...],
    are_listed: bool,
    itemsize: int | None,
    block: int | None,
) -> PackedForm:
    """Returns where gradients and flags lie.

    Args:
        are_listed: each is by itself, so all ranks have to know which ones have a gradient, not only those with a part.
        itemsize: of the memory that is written to, if it is.
        block: of so many numbers, in which they travel.
    """
    step = 1 if itemsize is None else alignment(itemsize)
    size = layout.shard_numel
    if block is not None:  # flags are in blocks of their own
        step = block
        size = rounded_up(size, step)
    pieces = [p for p in layout.pieces() if trainable[p.item]]
    flagged = [k for k, trains in enumerate(trainable) if trains and are_listed]
    return PackedForm(pieces, [size] * layout.world_size, even=True, step=step, flagged=flagged)


class GradientPack(ABC):
    """Packs, reduces and hands over the gradients of one flat parameter.

    Args:
        flat: whose original parameters' gradients these are.
        group: ranks that share it; its channel for gradients.
        reduce: how they travel.
        divisors: the sum over ranks is divided by the first before and by the second after it is formed.
        blocks: in which they travel, within the group or between replicas; None: as they are.

    Attributes:
        dtype: in which gradients travel.
        trainable: for each original parameter, whether it is.
        part_numel: numel of this rank's part of what is reduced.
        replicas: average the results; None where this rank alone holds the shard.
    """

    def __init__(
        self, flat: FlatParam, group: Group, reduce: ReducePolicy, divisors: tuple[float, float],
        blocks: BlockFormat | None = None,
    ) -> None:  # fmt: skip
        self._flat = flat
        self._group = group
        self._dtype = self.dtype = packed_dtype(flat, reduce)
        self._device = flat.compute_device
        # K of [Note: fixed order], 0 without one
        self._microbatches = 0 if reduce.order is None else microbatches(reduce, group.world_size)
        if self._microbatches:
            divisors = 1.0, 1.0
        before, after = divisors if group.world_size > 1 else (1.0, divisors[0] * divisors[1])
        is_mean = not self._microbatches and before * after == group.world_size and has_mean(self._dtype)
        self._op = ReduceOp.AVG if is_mean else ReduceOp.SUM
        self._before, self._after = (1.0, 1.0) if is_mean else (before, after)
        self._gradient_class = gradient_class(
            flat.group, "the FSDP root's clip_grad_norm_", True, in_order=self._microbatches > 0
        )
        self.in_flight: Reduction | None = None
        self.replicas: Group | CompressedAllReduce | None = None
        # at a shard on the host: who had it, where it comes to, whether all had
        self._arriving: list[tuple[list[bool], tuple[torch.Tensor, Copy], bool]] = []
        with as_tensors():
            self.trainable = list(map(_requires_grad, flat.originals))
        self._split: list[tuple[int, SplitParameter]] = []
        for k, m in enumerate(flat.originals):
            if isinstance(m, SplitParameter):
                self._split.append((k, m))
        self._in_runs: list[tuple[int, ShardLayout]] = []
        if flat.layout.runs > 1:
            self._in_runs = [(k, one) for k, one in enumerate(flat.layout.blocks) if one.runs > 1]
        self._size, self._in_blocks = flat.layout.shard_numel, blocks is not None
        itemsize = self._dtype.itemsize if group.backend.has_storage else None
        block = None if blocks is None else blocks.numel
        self._form = _form_for(flat.layout, tuple(self.trainable), flat.shards is not None, itemsize, block)
        self.part_numel = self._form.sizes[group.rank]
        self._here = self._form.items[group.rank]
        self._like = torch.empty(0, dtype=self._dtype, device=self._device)
        self._lay_out()

    @abstractmethod
    def _lay_out(self) -> None:
        """Makes what packs gradients in this form."""

    # ------------------------------------------------------------ sending
    def take(self, kept: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the original parameters' gradients, which these have no longer.

        Args:
            kept: those of earlier backwards that are kept elsewhere, by number of the original parameter.
        """
        with as_tensors():
            gradients = list(map(_grad_of, self._flat.originals))
            for m in self._flat.originals:
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

    def _scatter(self, packed: torch.Tensor, had: list[bool], had_all: bool, label: str = "") -> Reduction:
        label = label or f"gradients of {self._flat.label}"
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
        """Waits for the reduction, and adds the result, averaged over replicas too, to the shard's gradient."""
        if self.in_flight is None:
            self._forget_zeros(self._flat.unused.originals)
            return
        had, had_all, result, work = self.in_flight
        self.in_flight = None
        if work is not None:
            with self._flat.ranges.reduce_wait():
                work.wait()
            self._arrived()
        replicas = self.replicas
        if replicas is not None:
            result = self._average(result, replicas)
        if self._after != 1.0:
            result.mul_(1.0 / self._after)
        if not had_all:
            had = self._anywhere(had, result)
        ranks = self._group.world_size * (1 if replicas is None else replicas.world_size)
        if self._microbatches and ranks > 1:
            self.arrive_in_order(had, list(contributions(result, ranks)), had_all)
        elif self._flat.store.landing is not None:
            self.arrive(had, result, had_all)
        elif self._note(had, had_all, result):  # as :meth:`arrive`, which would be a call
            add_gradient(self._flat.param, self._own(result), self._gradient_class, is_last=True)

    def arrive(self, had: list[bool], result: torch.Tensor, had_all: bool) -> None:
        """Gives the shard the mean, the first [S] of this; some rank ``had`` these gradients, as far as is known."""
        landing = self._flat.store.landing
        if landing is not None and result.device.type == self._device.type:
            self._arriving.append((had, landing.start(result[: self._size]), had_all))
        else:
            self._give(had, result, had_all)

    def land(self) -> None:
        """Waits for what is on its way to the host; the shard has its gradient then."""
        landing = self._flat.store.landing
        if landing is not None:
            arriving, self._arriving = self._arriving, []
            for had, gradient, had_all in arriving:
                self._give(had, landing.finish(*gradient), had_all)
            landing.landed(bool(arriving))

    def _give(self, had: list[bool], result: torch.Tensor, had_all: bool) -> None:
        if self._note(had, had_all, result):
            add_gradient(self._flat.param, self._own(result), self._gradient_class, is_last=True)

    def arrive_in_order(self, had: list[bool], parts: list[torch.Tensor], had_all: bool) -> None:
        """Gives the shard each of these after the one before; see :meth:`arrive`."""
        listed = [listing.param for listing in self._flat.listings]
        hooked = [p for p in listed if p._backward_hooks or p._post_accumulate_grad_hooks]
        there = [p for p in listed if p.grad is not None]
        total = self._flat.param.grad if len(there) == len(listed) else None
        if not hooked and (total is not None or not there) and self._group.backend.has_storage:
            rest = parts[:-1] if there else parts[1:]
            with as_plain():
                total = self._own(parts[0]) if total is None else total
                for part in rest:
                    total.add_(self._own(part).view(total.shape))
            parts = parts[-1:] if there else [total]
        for part in parts:  # hooks see each of them
            self.arrive(had, part, had_all)

    def forget(self) -> None:
        """Waits for the reduction of a backward that died, and forgets the result."""
        reduction, self.in_flight = self.in_flight, None
        if reduction is not None and (work := reduction[3]) is not None:
            work.wait()
            self._arrived()
        arriving, self._arriving = self._arriving, []
        for _, (_, work), _ in arriving:
            work.wait_on_host()

    @abstractmethod
    def _arrived(self) -> None:
        """Gives back what was sent."""

    def _note(self, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """Notes which original parameters had no gradient on any rank; whether any with a part here had one."""
        flat, here = self._flat, self._here or range(len(had))
        if flat.shards is not None:
            flat.shards.hand_over(self._own(result), had, self._gradient_class)
            return False
        flat.unused.note(had, flat.param.grad is None)
        if True not in map(had.__getitem__, here):
            self._forget_zeros([flat.unused.originals[i] for i in here])
            return False
        return True

    def _anywhere(self, had: list[bool], result: torch.Tensor) -> list[bool]:
        """Tells which original parameters had a gradient on some rank, as far as they have a part here."""
        return had

    def _own(self, result: torch.Tensor) -> torch.Tensor:
        """Returns the shard's gradient [S] in what came, in the shard's dtype and on its device."""
        param, size = self._flat.param, self._size
        gradient = result if result.numel() == size else result[:size]
        if gradient.dtype != param.dtype or gradient.device != param.device:
            gradient = gradient.to(device=param.device, dtype=param.dtype)
        return gradient

    def forget_errors(self) -> None:
        """Drops what compression has left out so far."""
        if isinstance(self.replicas, CompressedAllReduce):
            self.replicas.forget_errors()

    def clear_unused(self, listing: Registered) -> None:
        """Notes that a registered parameter's gradient is new: none of its original parameters has had one yet."""
        unused = self._flat.unused
        if listing is self._flat:
            unused.clear(None)
        else:
            unused.originals[listing.first] = True

    def _forget_zeros(self, unused: Sequence[bool]) -> None:
        """Drops the shard's gradient where it is zeros that stand for nothing; see :class:`~.unit.LocalGradients`."""
        if False not in unused:
            self._flat.param.grad = None

    def _average(self, result: torch.Tensor, replicas: Group | CompressedAllReduce) -> torch.Tensor:
        if self._microbatches and isinstance(replicas, Group):
            # their sums are another order's
            everything = result.new_empty(replicas.world_size * result.numel())
            with self._flat.ranges.replicas():
                replicas.all_gather_into(everything, result, label=f"gradients of {self._flat.label}").wait()
            return everything
        is_mean = has_mean(result.dtype)
        if not is_mean:
            result.mul_(1.0 / replicas.world_size)
        with self._flat.ranges.replicas():
            replicas.all_reduce(
                result, op=ReduceOp.AVG if is_mean else ReduceOp.SUM, label=f"gradients of {self._flat.label}"
            ).wait()
        return result


class StoredPack(GradientPack):
    """Packs into a buffer [W * (S + F)] whose memory exists while it is in use."""

    def _lay_out(self) -> None:
        flat = self._flat
        self._packed = torch.empty(self._form.starts[-1], dtype=self._dtype, device=self._device)
        shapes = list(map(_shape_of, flat.originals))
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
    def nbytes(self) -> int:
        """Returns the bytes that are packed and sent, of all ranks' parts."""
        return self._form.starts[-1] * self._dtype.itemsize

    @property
    def joins(self) -> object:
        """Equal for packs that can travel as one message."""
        kind, flat = type(self), self._flat
        return (
            kind,
            self._group,
            self._dtype,
            self._device,
            self._op,
            self._before,
            self._after,
            self._microbatches,
            flat.shards is None,
        )


class JoinedReduction:
    """The gradients of several flat parameters as one message: for each rank its parts one after the other, and flags.

    Args:
        packs: that would reduce them one by one; their ``joins`` are equal.
    """

    def __init__(self, packs: Sequence[StoredPack]) -> None:
        first, self.packs = packs[0], packs
        self._first, self._backend = first, first._group.backend
        step, size, base = alignment(first._dtype.itemsize), 0, 0
        pieces: list[Piece] = []
        flagged: list[int] = []
        # of each: number of its first gradient, start in a rank's part
        self._places: list[tuple[int, int]] = []
        shapes: list[torch.Size] = []
        for pack in packs:
            self._places.append((base, size))
            for p in pack._form.pieces:
                pieces.append(p._replace(item=p.item + base, offset=p.offset + size))
            if pack._flat.shards is not None:
                flagged += [base + k for k in pack._form.items[0]]
            shapes += [original.shape for original in pack._flat.originals]
            base, size = len(shapes), rounded_up(size + pack._size, step)
        self._form = PackedForm(
            pieces, [size] * first._group.world_size, even=True, step=step, flagged=flagged
        )
        self._trainable = [trains for pack in packs for trains in pack.trainable]
        self._packed = torch.empty(self._form.starts[-1], dtype=first._dtype, device=first._device)
        self._written = WrittenPack(self._form, self._packed, shapes)
        self._backend.release_storage(self._packed)
        self.in_flight: Reduction | None = None

    def send(self, gradients: list[torch.Tensor | None]) -> None:
        """Starts (collective); takes the gradients, pack by pack."""
        had = list(map(is_not, gradients, repeat(None)))
        had_all = False not in compress(had, self._trainable)
        self._backend.take_storage(self._packed)
        self._written.write(gradients, None if had_all else had)
        gradients.clear()
        label = f"gradients of {self._first._flat.label} and {len(self.packs) - 1} more"
        self.in_flight = self._first._scatter(self._packed, had, had_all, label)

    def is_reduced(self) -> bool:
        """Whether :meth:`receive` would not wait."""
        return self.in_flight is None or (work := self.in_flight[3]) is None or work.is_done()

    def forget_reduction(self) -> None:
        """Waits; shards get nothing."""
        reduction, self.in_flight = self.in_flight, None
        if reduction is not None:
            self._wait(reduction[3])

    def _wait(self, work: Work | None) -> None:
        for pack in self.packs:  # the first one waits; traces show the others, too
            with pack._flat.ranges.reduce_wait():
                (work or DONE).wait()
        self._backend.release_storage(self._packed)

    def receive(self) -> None:
        """Waits; shards get their gradients."""
        reduction, self.in_flight = self.in_flight, None
        if reduction is None:
            return
        had, had_all, result, work = reduction
        self._wait(work)
        if self._first._after != 1.0:
            result.mul_(1.0 / self._first._after)
        if not had_all:
            had = self._form.anywhere(had, result, self._first._group.rank)
        world = self._first._group.world_size
        parts = list(contributions(result, world)) if self._first._microbatches else []
        for pack, (number, start) in zip(self.packs, self._places, strict=True):
            here = had[number : number + len(pack.trainable)]
            if parts:
                pack.arrive_in_order(here, [part[start : start + pack._size] for part in parts], had_all)
            else:
                pack.arrive(here, result[start : start + pack._size], had_all)


@final
class CompressedPack(StoredPack):
    """Packs as :class:`StoredPack`, whose buffer [W * (S + F)] is given back as soon as its blocks are made."""

    def __init__(
        self, flat: FlatParam, group: Group, reduce: ReducePolicy, divisors: tuple[float, float], blocks: BlockFormat
    ) -> None:  # fmt: skip
        super().__init__(flat, group, reduce, divisors, blocks)
        self._after = divisors[0] * divisors[1]  # sums are of fp32
        self._exchange = CompressedReduceScatter(group, blocks, self._form.sizes, reduce.error_feedback)

    def _scatter(self, packed: torch.Tensor, had: list[bool], had_all: bool, label: str = "") -> Reduction:
        label = label or f"gradients of {self._flat.label}"
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

    def _arrived(self) -> None:
        """Lets the compiler free what was sent."""

    def _note(self, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """Notes as :meth:`GradientPack._note` does, but elements, and as data."""
        flat, used = self._flat, None
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

    def _own(self, result: torch.Tensor) -> torch.Tensor:
        return super()._own(result).clone()  # else the tensor that it is a view of lives on beside it


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

    def _arrived(self) -> None:
        """Nothing was sent."""


def pack_for(
    flat: FlatParam, replicas: Group | None, reduce: ReducePolicy, divisors: tuple[float, float]
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
    if group.world_size > 1 and not has_replicas and blocks is not None:
        pack: GradientPack = CompressedPack(flat, group, reduce, divisors, blocks)
        pack.replicas = replicas
        return pack
    if group.world_size == 1 and not has_replicas:  # replicas tell each other by flags who had which gradient
        kind: type[GradientPack] = WholePack
    else:
        kind = StoredPack if group.backend.has_storage else LazyPack
    pack = kind(flat, group, reduce, divisors, blocks)
    pack.replicas = replicas
    if blocks is not None and replicas is not None:
        pack.replicas = CompressedAllReduce(replicas, blocks, pack.part_numel, reduce.error_feedback)
    return pack


@functools.cache
def predivide_factor(world_size: int) -> int:
    """Returns the power of two next to the root of the world size that divides it (fairscale's choice)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor
