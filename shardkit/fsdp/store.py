"""Where the values of a flat parameter are: the mode is a class chosen once, what memory means is a state.

Legend: W world size, S shard numel, N numel of all original parameters.

States follow each other so (:data:`TRANSITIONS`)

::

        RELEASED --start--> GATHERING --finish--> GATHERED <--lock, unlock--> LOCKED
           ^ |   --start, where there is nothing to wait for--> GATHERED
           | |
           | |   GATHERED, LOCKED --release--> RELEASED,
           | |   or from GATHERED to KEPT, from where the next gathering starts too
           | v
        SUMMONED

[Note: kept views] While a unit is gathered, a view of an original parameter is a tensor like any other. When the unit's
memory is given back, it is a tensor without memory: reading it would end the process, or show what lies there now. So
where a module of the unit keeps one, or anybody what ``.data`` has given, it changes its class with the original
parameters (see [Note: released] of ``originals.py``), and back when they have their values again. To find it costs a
step nothing: storage knows how many tensors look at it. Where they are no more than the last time, and all were
autograd's then, nothing is new; else the attributes of the unit's modules are looked through.

[Note: given back] What autograd saved has its memory again when backward enters a unit by what forward returned or a
module kept. By what left otherwise (in a closure, a global list) it would come to no memory, and the process to its
end. Autograd compares versions: each parameter without memory has one that nothing else ever had, by which errors name
it (:data:`versions_given_back`).

[Note: packed shards] Where each original parameter is cut by itself (``PackedLayout``), one all-gather brings the parts
of all of them rank by rank, and one operation copies these to where original parameters are views. The memory that was
gathered into exists from the all-gather to the copy. Other layouts need no copy: they are gathered in their places.

[Note: joined gathers] What is needed at a time travels as one message: a unit's frozen and its trainable parameters,
say. Where it is small, shards are put together and copied to their places after the gather, which costs less than a
message more; where it is large, a message more is nothing beside its bytes, and a copy would be.

[Note: one gather a unit] Where execution is lazy, all collectives of a program are in one order, so that each is needed
by the next, and the compiler drops none: a bias that backward never reads would be gathered again, too. So what a unit
asks for at a time travels together.

[Note: masters] Shards on the host, in full precision, have a copy on the device in the dtype that is computed in, of P
bytes. So the optimizer runs on the host, where its state is too, and nothing that is read there differs from what it is
without a copy: gradients, clipping, state dicts. What differs is what crosses the bus, and when.

- *Up.* Gathers read the copy. It is renewed after each step of an optimizer, P bytes, unit by unit in the order of
  forward; a unit's gather waits for its own part. Any other change of a shard is noticed in front of the next gather:
  by its version, or by a sample of its numbers where a program writes by ``.data`` (an EMA that is swapped in). Values
  are cast on the host, into pinned memory that nobody else writes to: what is on its way stays what it was, whatever
  the program does to the shards meanwhile.
- *Down.* A reduced gradient is copied as it has travelled between ranks, P bytes a backward, while backward goes on.
  The host casts what has come before it issues the next reduction, and at the end of backward waits for the rest.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain, compress, islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from ..backend import DONE, Backend, Copy, Group, Work
from ..layout import PackedLayout, ShardLayout
from ..reduction.compression import ChangedParts, CompressedGather, format_for
from ..torch_seams.hooks import NO_BACKWARD, current_backward, versions_given_back
from ..torch_seams.tensors import local_of
from ..types import AnyCallable, Tree
from .originals import (
    OriginalParameter,
    ReleasedParameter,
    ReleasedView,
    as_tensors,
    kept_views,
    known_originals,
    set_data,
    without_values,
)

if TYPE_CHECKING:
    from .flat_param import FlatParam


class State(Enum):
    """Says what original parameters are at a time."""

    RELEASED = "they have shapes, and no memory of their own"
    KEPT = "released; ranks of the post-forward mesh keep the values between them, each a part"
    GATHERING = "their memory is taken, and an all-gather that nobody has waited for writes to it"
    GATHERED = "they have their values"
    LOCKED = "gathered for backward: autograd has their values, and nobody else may read or write them"
    SUMMONED = "they have values in full precision, in memory of their own"


# By names of the module: up to Python 3.11 an attribute of an Enum costs a Python call.
RELEASED, KEPT, GATHERING, GATHERED, LOCKED, SUMMONED = State
FULL = (GATHERED, LOCKED, GATHERING)  # the memory is in use

# What may follow what; held by the tests, not in each step.
TRANSITIONS: dict[State, tuple[State, ...]] = {
    RELEASED: (GATHERING, GATHERED, SUMMONED),
    KEPT: (GATHERING, RELEASED, SUMMONED),
    GATHERING: (GATHERED, RELEASED),  # released where the all-gather failed
    GATHERED: (LOCKED, RELEASED, KEPT),
    LOCKED: (GATHERED, RELEASED),
    SUMMONED: (RELEASED, KEPT),
}


def taken_apart(values: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """Returns the items in [N or more], each in one dimension: views."""
    sizes, numbers = layout.parts
    parts = torch.split_with_sizes(values, [*sizes, values.numel() - layout.numel])
    return list(map(parts.__getitem__, numbers))


def put_together(rows: Sequence[torch.Tensor], layout: ShardLayout) -> torch.Tensor:
    """Returns items of any shape as the flat parameter [W * S]; zeros are between and behind them."""
    sizes, numbers = layout.parts
    placed: dict[int, torch.Tensor] = {}
    for number, row in zip(numbers, rows, strict=True):
        placed[number] = row.reshape(-1)
    for number, size in enumerate([*sizes, layout.padded_numel - layout.numel]):
        if number not in placed and size:
            placed[number] = rows[0].new_zeros(size)
    return torch.cat(list(map(placed.__getitem__, sorted(placed))))


def own_part(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part of values [W * S], rank by rank, [S]: a view, or where execution is lazy a copy.

    There, which part it is is data, so that all ranks build one graph.
    """
    if not group.backend.has_storage:
        rank = torch.tensor([group.rank], device="cpu").to(values.device)
        return values.view(group.world_size, -1).index_select(0, rank).view(-1)
    size = values.numel() // group.world_size
    return values[group.rank * size : (group.rank + 1) * size]


def own_shard(values: torch.Tensor, layout: ShardLayout, group: Group) -> torch.Tensor:
    """Returns this rank's shard [S] of a flat parameter's values, items in their places; a view where possible."""
    if type(layout) is ShardLayout and layout.runs == 1 and not layout.copies:
        return own_part(values, group)
    blocks = values.split([block.padded_numel for _, block in layout.blocks])
    parts = [
        block[:1]
        if alone.copies
        else own_part(block if alone.runs == 1 else rank_by_rank(block, alone), group)
        for block, (_, alone) in zip(blocks, layout.blocks, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rank_by_rank(values: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Orders one item's elements as the ranks' parts of it follow each other, where these consist of several runs."""
    return _as_parts(values.reshape(-1), layout).reshape(-1)


def _as_parts(values: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Views one item as the ranks' parts of it, [W, numel], or [W, runs, numel of a run]."""
    if layout.runs == 1:
        return values.view(layout.world_size, -1)
    return values.view(layout.runs, layout.world_size, -1).transpose(0, 1)


class Unpacking:
    """Puts the items of a packed flat parameter into their places; see [Note: packed shards].

    Args:
        layout: of the flat parameter.
        full: where items lie, [W * S].
    """

    def __init__(self, layout: ShardLayout, full: torch.Tensor) -> None:
        blocks = [block for _, block in layout.blocks]
        self._world_size, self._sizes = layout.world_size, [block.shard_numel for block in blocks]
        items = full.split([block.padded_numel for block in blocks])
        self._places = [_as_parts(item, block) for item, block in zip(items, blocks, strict=True)]
        self._in_runs = layout.runs > 1

    def unpack(self, gathered: torch.Tensor) -> None:
        """Copies what was gathered, [W, S] or [W * S] rank by rank: one operation."""
        rows = gathered if gathered.dim() == 2 else gathered.view(self._world_size, -1)
        if not self._in_runs:
            torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._places)
            return
        parts = torch.split_with_sizes(rows, self._sizes, dim=1)
        shaped = [part.view(place.shape) for part, place in zip(parts, self._places, strict=True)]
        torch._foreach_copy_(self._places, shaped)


def unpacked(gathered: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Puts items in their places, of values gathered rank by rank, [W * S]."""
    if len(layout.blocks) == 1 and layout.runs == 1:
        return gathered
    made = torch.empty_like(gathered)
    Unpacking(layout, made).unpack(gathered)
    return made


_param_of, _version_of, _local_of = map(attrgetter, ("param", "param._version", "param._local_tensor"))
set_versions: AnyCallable = torch._C._autograd._unsafe_set_version_counter


class Store(ABC):
    """Keeps the values of one flat parameter, and shows them to its original parameters.

    Attributes:
        state: see :class:`State`.
        memory: identifies what original parameters are views of, where that is given back after use; else 0.
        in_flight: the gathering that nobody has waited for, and what it fills, [W * S].
        users: how many units need the values now.
        keeps_shapes: original parameters have their shapes while they have no values.
        serves_on: a new one would not do where nothing has changed.
        is_whole: this rank's shard has all values, as they are computed with.
        summoned: all values in full precision, [W * S], while they are what original parameters are views of.
        joins: equal where shards can travel as one message; None where they travel alone.
        copied: version, memory and some numbers of the shard that the device has a copy of, on the host.
        landing: brings gradients to a shard on the host beside what is computed, where something does.
        away: tensors without memory, and the versions that they have with it; see [Note: given back].
    """

    keeps_shapes = True
    serves_on = False
    joins: object = None
    copied: tuple[object, ...] | None = None
    landing: Landing | None = None
    away: tuple[list[torch.Tensor], list[int]] | None = None

    def __init__(self, flat: FlatParam) -> None:
        self._flat = flat
        self._originals = flat.originals
        self._layout = flat.layout
        self._group = flat.group
        self._backend = flat.group.backend
        self._channel = flat.group.channel("parameters")
        self._over = flat.gathers_over or self._channel
        self._dtype, self._device = flat.compute_dtype, flat.compute_device
        self._versions: list[int] = []  # of original parameters, when they got their values
        self._last: list[int] = []  # when they had them last
        are_split = [*map(hasattr, map(_param_of, self._originals), repeat("_local_tensor"))]
        self._split = [*compress(self._originals, are_split)]
        gone = [*islice(versions_given_back, len(self._originals))]
        self._gone = [*gone, *compress(gone, are_split)]  # their versions without memory
        # what a program was given as their data, and the version then; None where it has set them
        self._seen: list[tuple[int, torch.Tensor | None, int]] = []
        self._lent: list[tuple[int, TensorWeakRef]] = []  # between uses, what it may keep of these
        self.is_whole = flat.is_whole
        self.state: State = RELEASED
        self.memory = 0
        self.summoned: torch.Tensor | None = None
        self.in_flight: tuple[Work, torch.Tensor] | None = None
        self.users = 0

    def _gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        *,
        async_op: bool = False,
        label: str = "",
        over: Group | None = None,
    ) -> Work:
        """Gathers all ranks' shards, ``over`` a group or what is for values that are computed with."""
        if self._flat.on_gather is not None:
            self._flat.on_gather(full, shard)
        return (over or self._over).all_gather_into(full, shard, async_op=async_op, label=label)

    def send_over(self, group: Group | None) -> None:
        """Gathers values that are computed with over this from now on; None: over the channel for parameters."""
        self._over = group or self._channel
        if self.joins is not None:
            self.joins = self._over, self._dtype, self._device

    def _from_host(self, full: torch.Tensor) -> None:
        """Takes what was gathered before from its copy on the host."""
        if self._flat.host is not None:
            self.in_flight = self._backend.copy_up(full, self._flat.host), full

    def _to_host(self, full: torch.Tensor) -> None:
        """Copies what was gathered, the first time, where it stays there from now on."""
        if self._flat.kept_at is not None and self._flat.host is None:
            self._flat.host = self._backend.pin(full)

    def fits(self) -> bool:
        """Whether it can serve on after the shard's device or dtype, or the group, may have changed."""
        now = self._flat.group, self._flat.compute_dtype, self._flat.compute_device
        return self.serves_on and now == (self._group, self._dtype, self._device)

    @property
    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """Returns the tensor that original parameters are views of, [W * S]; it may have no memory now."""

    # ------------------------------------------------------------ transitions
    def attach(self) -> None:
        """Takes over original parameters, which are released from now on."""
        self._reveal()
        self.show(self.gathered)
        self._conceal()

    @abstractmethod
    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        """Goes from released or kept to gathering (collective), or to gathered where there is nothing to wait for."""

    def finish(self) -> None:
        """Goes from gathering to gathered."""
        if self.in_flight is None:
            return  # there was nothing to wait for; or it has failed, and there are no values
        (work, values), self.in_flight = self.in_flight, None
        with self._flat.ranges.gather_wait():
            work.wait()
        self.state = GATHERED
        self._show_gathered(values)

    def _show_gathered(self, values: torch.Tensor) -> None:
        """Gives original parameters what a gathering has brought."""
        raise NotImplementedError(type(self).__name__)

    def lock(self) -> None:
        """Goes from gathered to locked."""
        if self.state is GATHERED:
            self.state = LOCKED
            self._conceal()

    def unlock(self) -> None:
        """Goes from locked to gathered."""
        self.state = GATHERED
        self._reveal()

    def release(self, until_backward: bool = False) -> None:
        """Goes to released, from where values are used; to kept, with ``until_backward``, if there is a mesh for it."""
        if self.state is GATHERING:
            self.finish()  # its memory is in use until it is through
        if self.state in FULL:
            self._give_back(until_backward)
        self.users = 0

    @abstractmethod
    def _give_back(self, until_backward: bool = False) -> None:
        """Takes values from original parameters, and frees their memory; see :meth:`release`."""

    def forget_kept(self) -> None:
        """Goes from kept to released: the shards may have changed."""
        self.state = RELEASED

    def renew(self, always: bool = True) -> None:  # noqa: B027 - most have no copy
        """Copies the shard to the device, where that has a copy; see [Note: masters]."""

    # ------------------------------------------------------------ what original parameters see
    def show(self, values: torch.Tensor) -> None:
        """Makes original parameters views of this, [N] or more."""
        for original, piece in zip(self._originals, taken_apart(values, self._layout), strict=True):
            original.assign(piece)

    def show_computed(self, full: torch.Tensor) -> None:
        """Makes them what a forward computes with, of values in full precision, [W * S]."""
        self.show(full.to(self._dtype))

    def _reveal(self) -> None:
        """Makes them parameters like any other."""
        if self.away is not None:
            self.away = set_versions(*self.away)  # which returns None
        if self._lent:
            self._seen = [(k, data, data._version) for k, ref in self._lent if (data := ref()) is not None]
            self._lent = []
        for original in self._originals:
            original.param.__class__ = original.kind
        if self._flat.lists_dtensors:
            self._be_attributes(True)
        try:
            self._versions = self._last = list(map(_version_of, self._originals))
        except RuntimeError:  # of inference tensors
            self._versions = self._last = []

    def _conceal(self, is_gone: bool = False) -> None:
        """Takes their values from them (see ``originals.py``); notes which of them were written to meanwhile."""
        before = self._versions
        if before:
            now = self._last = list(map(_version_of, self._originals))
            if self._seen:
                self._count_data(now)
            self._flat.written = [k for k, v in enumerate(now) if v != before[k]] if now != before else []
            self._versions = []
        if is_gone and self._last and self.away is None:  # else they are memory for backward still
            tensors = [*map(_param_of, self._originals), *map(_local_of, self._split)]
            gone = self._gone
            for number, ref in self._lent:
                if (data := ref()) is not None:
                    tensors, gone = [*tensors, data], [*gone, self._gone[number]]
            self.away = tensors, [*self._last, *map(attrgetter("_version"), tensors[len(self._last) :])]
            set_versions(tensors, gone)
        for original in self._originals:
            original.param.__class__ = original.released
        if self._flat.lists_dtensors:
            self._be_attributes(False)

    def note_data(self, number: int, data: torch.Tensor | None) -> None:
        """Notes that a program has asked for the data of an original parameter in use, or has set them (None)."""
        if self._versions and not self.is_whole and self.state is GATHERED:
            self._seen.append((number, data, 0))

    def _count_data(self, versions: list[int]) -> None:
        """Adds how often data were written to, or that they are others still."""
        for number, data, since in self._seen:
            if data is not None:
                versions[number] += data._version - since
                if self.memory:  # else a tensor of its own
                    self._lent.append((number, TensorWeakRef(data)))
            elif not self._backend.has_storage:
                versions[number] += 1
            elif self._originals[number].param.untyped_storage()._cdata != self.memory != 0:
                versions[number] += 1
                self.show(self.gathered)
        self._seen.clear()

    def _be_attributes(self, have_values: bool) -> None:
        """Makes attributes of modules the original parameters, or what is listed; see ``flat_param.py``."""
        for original in self._originals:
            for module, name in original.places:
                if have_values:
                    module.__dict__[name] = original.param
                else:
                    module.__dict__.pop(name, None)

    # ------------------------------------------------------------ full precision
    @torch.no_grad()
    def summon(self) -> torch.Tensor:
        """Goes from released or kept to summoned (collective); returns all values, [W * S], which are to be shown."""
        full = shard = self._flat.param.data.contiguous().view(-1).to(self._device)
        if shard.is_meta:
            full = shard.new_empty(self._layout.padded_numel)
        elif self._group.world_size == 1:
            full = shard.clone()
        else:
            full = shard.new_empty(self._layout.padded_numel)
            with self._flat.ranges.summon():
                label = f"{self._flat.label} in full precision"
                self._gather(full, shard, label=label, over=self._channel)
            full = unpacked(full, self._layout)
        self.summoned, self.state = full, SUMMONED
        self._reveal()
        return full

    @torch.no_grad()
    def collect(self, values: torch.Tensor) -> None:
        """Copies original parameters to where they belong in [N or more], unless they are views of it."""
        for original, start in zip(self._originals, self._layout.offsets(), strict=True):
            data = original.values
            mine = values[start : start + original.shape.numel()]
            if not self._backend.has_storage or data.data_ptr() != mine.data_ptr():
                mine.copy_(data.reshape(-1))

    @torch.no_grad()
    def keep(self, values: torch.Tensor) -> None:
        """Takes this rank's part from original parameters: views of ``values`` unless somebody replaced them."""
        self.collect(values)
        self._flat.param.data.view(-1).copy_(own_shard(values, self._layout, self._group))


_holders_of = torch._C._storage_Use_Count  # how many tensors look at a storage
_address_of = torch._C._storage_address  # type: ignore[attr-defined]


class KeptViews:
    """The views of one flat parameter's original parameters that modules keep.

    Args:
        memory: identifies the storage that original parameters are views of.
        originals: in the order of ``layout``.

    Attributes:
        found: those that were; some may be gone.
    """

    def __init__(self, memory: int, originals: Sequence[OriginalParameter], layout: ShardLayout) -> None:
        self._memory = memory
        self._originals = originals
        self._layout = layout
        # How many tensors looked at the memory the last time none was kept; by whether gradients were enabled, and
        # whether a backward ran.
        self._familiar: dict[tuple[bool, bool], int] = {}
        self.found: list[tuple[TensorWeakRef, type[torch.Tensor]]] = []

    def conceal(self, modules: Sequence[nn.Module], lent: Sequence[tuple[int, TensorWeakRef]]) -> None:
        """Notes that the memory is about to be given back; views may be kept by these modules, or by whoever."""
        state = (torch.is_grad_enabled(), current_backward() != NO_BACKWARD)
        now = _holders_of(self._memory)
        alive = [data for _, ref in lent if (data := ref()) is not None] if lent else []
        if not self.found and not alive and now <= self._familiar.get(state, 0):
            self._familiar[state] = now
            return
        self._find(modules, alive)
        if not self.found:
            self._familiar[state] = _holders_of(self._memory)
            return
        offsets, numbers = zip(
            *sorted((start, k) for k, start in enumerate(self._layout.offsets())), strict=True
        )
        with as_tensors():
            for ref, _ in self.found:
                tensor: Tree = ref()
                offset = int(local_of(tensor).storage_offset())
                number = numbers[max(0, bisect.bisect_right(offsets, offset) - 1)]
                kept_views[tensor] = known_originals[id(self._originals[number].param)][1:]
                kind = ReleasedParameter if isinstance(tensor, nn.Parameter) else ReleasedView
                tensor.__class__ = without_values(kind, tensor)

    def _find(self, modules: Sequence[nn.Module], lent: Sequence[torch.Tensor]) -> None:
        found = {id(t): (ref, kind) for ref, kind in self.found if (t := ref()) is not None}
        own = {id(original.param) for original in self._originals}
        kept = chain.from_iterable(_tensors_in(list(module.__dict__.values())) for module in modules)
        for tensor in chain(lent, kept):
            local = local_of(tensor)
            if id(tensor) in own or id(tensor) in found or not torch._C._has_storage(local):
                continue
            if _address_of(local) == self._memory:
                found[id(tensor)] = (TensorWeakRef(tensor), type(tensor))
        self.found = list(found.values())

    def reveal(self) -> None:
        """Notes that the memory is back."""
        for ref, kind in self.found:
            if (tensor := ref()) is not None:
                tensor.__class__ = kind


def _tensors_in(values: Tree, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yields all tensors in nested lists, tuples, sets and dicts, and what derives from these; not deeper: cycles."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | set) and depth:
            yield from _tensors_in(value, depth - 1)
        elif isinstance(value, dict) and depth:
            yield from _tensors_in(list(value.values()), depth - 1)


class Stored(Store):
    """One buffer whose memory is taken for gathering and given back; views of it come back to life with it.

    Such views are the original parameters, and what autograd saved of them.
    """

    serves_on = True  # views of the memory may be saved for backward

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self._mesh = flat.post_forward_mesh
        self._kept: torch.Tensor | None = None  # this rank's part of what the mesh keeps
        self._shard: torch.Tensor | None = None  # what is sent: the shard's memory, [S]
        self._joined: dict[tuple[Stored, ...], Joined] = {}  # messages that begin with this one
        self.arrives_in: Joined | None = None
        blocks = None
        if flat.compression is not None and self._group.world_size > 1:
            blocks = format_for(flat.compression, self._layout.shard_numel, self._dtype)
        self._compressed = None if blocks is None else CompressedGather(self._group, blocks)
        self._received: torch.Tensor | None = None  # [W, S], where only changes are sent
        self._changed: ChangedParts | None = None
        self._sends_changes = flat.sends_changes and self._group.world_size > 1
        if self._mesh is None and blocks is None and self._group.world_size > 1 and not self._sends_changes:
            self.joins = self._over, self._dtype, self._device
        self._look_at(torch.empty(self._layout.padded_numel, dtype=self._dtype, device=self._device))

    def _look_at(self, full: torch.Tensor) -> None:
        self._full = full  # [W * S]
        self._own = own_part(full, self._group)  # [S]
        self._rows = full.view(self._group.world_size, -1)  # [W, S]
        self._unpack: Callable[[torch.Tensor], None] | None = None
        if self._group.world_size > 1 and (isinstance(self._layout, PackedLayout) or self._layout.runs > 1):
            self._unpack = Unpacking(self._layout, full).unpack
        self.memory = full.untyped_storage()._cdata
        self._kept_views = KeptViews(self.memory, self._originals, self._layout)

    @property
    def gathered(self) -> torch.Tensor:
        return self._full

    def attach(self) -> None:
        self.summoned = None
        if not self._full.untyped_storage().nbytes():  # it is not new
            self._backend.take_storage(self._full)
        self._reveal()
        self.show(self._full)
        self._conceal(True)
        self._backend.release_storage(self._full)
        self.state = RELEASED if self._kept is None else KEPT

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        flat, full, kept = self._flat, self._full, self._kept
        self.state = GATHERING
        if flat.host is not None:
            self._backend.take_storage(full)
            self._from_host(full)
            return
        if kept is not None and self._mesh is not None:
            self._kept = None
            self._backend.take_storage(full)
            mesh = self._mesh.channel("parameters")
            work = mesh.all_gather_into(full, kept, async_op=True, label=flat.label)
            self.in_flight = work, full
            return
        if self._sends_changes:
            self._start_changes()
            return
        if self._unpack is not None and self._compressed is None:
            self.joined(self).start()
            return
        if self._compressed is not None:
            if self._unpack is None:
                self._backend.take_storage(full)
            else:
                full = torch.empty_like(full)
            shard = flat.param.data.view(-1).to(self._device)
            work = self._compressed.start(self._gather, full, shard, flat.label)
        else:
            self._backend.take_storage(full)
            self._own.copy_(self.sent())  # casts, and comes from the host
            if self._group.world_size == 1:
                work = DONE
            else:
                # a call less
                gather = self._over.all_gather_into if flat.on_gather is None else self._gather
                work = gather(full, self._own, async_op=True, label=flat.label)
        self.in_flight = work, full

    @torch.no_grad()
    def _start_changes(self) -> None:
        """Sends what has changed since the last gathering, to memory that stays."""
        flat, received = self._flat, self._received
        if received is None or self._changed is None:
            with torch.inference_mode(False):  # made when first needed, as joined messages are
                received = torch.zeros(self._layout.padded_numel, dtype=self._dtype, device=self._device)
            self._received = received
            sizes = [self._layout.shard_numel] * self._group.world_size
            self._changed = ChangedParts(self._channel, received, sizes)
        own = own_part(received, self._group)
        own.copy_(self.sent())
        if flat.on_gather is not None:
            flat.on_gather(received, own)
        self.in_flight = self._changed.send(flat.label), received.view(self._group.world_size, -1)

    def joined(self, *stores: Stored) -> Joined:
        """Returns the message of these stores, of which this one is the first; made once."""
        if stores not in self._joined:
            if len(self._joined) == _MOST:
                self._joined.clear()
            self._joined[stores] = Joined(stores)
        return self._joined[stores]

    def sent(self) -> torch.Tensor:
        """Returns the shard's memory, [S]."""
        shard = self._shard
        if shard is None or shard.data_ptr() != self._flat.param.data_ptr():  # else two operations less
            shard = self._shard = self._flat.param.data.view(-1)
        return shard

    def finish(self) -> None:
        """Goes from gathering to gathered; as others do, with a call less."""
        if self.in_flight is None:
            return  # it has failed, and there are no values
        (work, values), self.in_flight = self.in_flight, None
        with self._flat.ranges.gather_wait():
            work.wait()
        self.state = GATHERED
        if values is not self._full:
            self._backend.take_storage(self._full)
            if self._unpack is None:
                self._rows.copy_(values)
            else:
                with torch.no_grad():
                    self._unpack(values)
            if self.arrives_in is not None:
                self.arrives_in.leave()
                self.arrives_in = None
        if self._flat.keeps_on_host:
            self._to_host(self._full)
        self._reveal()
        if self._kept_views.found:
            self._kept_views.reveal()

    def lock(self) -> None:
        super().lock()
        if self.state is LOCKED:
            self._kept_views.conceal(self._flat.modules, self._lent)

    def unlock(self) -> None:
        super().unlock()
        self._kept_views.reveal()

    def _give_back(self, until_backward: bool = False) -> None:
        is_there = self.state is not GATHERING and self._flat.host is None
        if until_backward and is_there and self._mesh is not None:
            self._kept = own_part(self._full, self._mesh).clone()
        if not self._full.untyped_storage().resizable():  # numpy or the like has a view, and keeps the memory
            self._look_at(torch.empty_like(self._full))
            self.show(self._full)
        self._conceal(True)
        self._kept_views.conceal(self._flat.modules, self._lent)
        self._backend.release_storage(self._full)
        self.state = RELEASED if self._kept is None else KEPT

    def forget_kept(self) -> None:
        self._kept = None
        super().forget_kept()


_SAMPLE = 256  # numbers of a shard
_one = torch.empty(1, device="cpu")
_ALONE = _holders_of(_one.untyped_storage()._cdata)


class Landing:
    """Brings gradients of one shard from the device to the host.

    Attributes:
        is_idle: a gradient has come since the copy was read: the device, too, is through with it.
        then: called when a backward has brought its gradient.
    """

    def __init__(self, backend: Backend, size: int, dtype: torch.dtype) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._memory: dict[torch.dtype, torch.Tensor] = {}  # pinned
        self._arriving: list[tuple[torch.Tensor, Copy, Callable[[torch.Tensor], None]]] = []
        self.is_idle = False
        self.then: Callable[[], None] | None = None

    def start(self, gradient: torch.Tensor, give: Callable[[torch.Tensor], None]) -> None:
        """Copies a gradient of the device, [S], beside what is computed; ``give`` gets it on the host."""
        memory = self._unused(gradient.dtype)
        self._arriving.append((memory, self._backend.copy_down(memory, gradient), give))

    def land(self, at_end: bool = False) -> bool:
        """Gives what has come, in the shard's dtype; ``at_end`` of backward waits for the rest. Says if all has."""
        while self._arriving and (at_end or self._arriving[0][1].is_done()):
            memory, work, give = self._arriving.pop(0)
            work.wait_on_host()
            give(memory if memory.dtype == self._dtype else self._unused(self._dtype).copy_(memory))
            self.is_idle = True
        if at_end and self.then is not None:
            self.then()
        return not self._arriving

    def forget(self) -> None:
        """Waits for what is on its way, which nobody gets."""
        while self._arriving:
            self._arriving.pop()[1].wait_on_host()

    def _unused(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [S] that nobody else looks at: that of the last step, unless its gradients are still there."""
        kept = self._memory.get(dtype)
        if kept is None or _holders_of(kept.untyped_storage()._cdata) > _ALONE:
            kept = self._memory[dtype] = self._backend.pinned(self._size, dtype)
        return kept.view(-1)


@final
class Mirrored(Stored):
    """Gathers from a copy of the shard.

    Attributes:
        copy: on the device, [S].
    """

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self.landing: Landing = Landing(self._backend, flat.layout.shard_numel, flat.param.dtype)
        size = flat.layout.shard_numel
        self.copy = torch.empty(size, dtype=self._dtype, device=self._device)
        self._staged = self._backend.pinned(size, self._dtype)
        self._work: Copy = DONE

    @torch.no_grad()
    def renew(self, always: bool = True) -> None:
        """Copies the shard to the device, beside what is computed; where it has another version, or ``always``."""
        shard = self._flat.param.data.view(-1)
        # changes around its version are told by some of its numbers
        sample = [] if shard.is_meta else shard[:: max(1, len(shard) // _SAMPLE)].tolist()
        now = self._flat.version, shard.data_ptr(), sample
        if not always and self.copied == now:
            return
        if not self._work.is_done():  # nothing has been computed with what came up last
            self._work.wait_on_host()
        self._work.wait()
        self._staged.copy_(shard)
        self._work = self._backend.copy_up(self.copy, self._staged, at_once=self.landing.is_idle)
        self.copied = now

    def sent(self) -> torch.Tensor:
        self.renew(always=False)
        self._work.wait()
        self.landing.is_idle = False
        return self.copy


@final
class Lazy(Store):
    """Original parameters get new values with each gathering, and an empty one afterwards.

    What nobody refers to, the compiler frees; see ``fsdp/forward.py``.
    """

    keeps_shapes = False

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self._full: torch.Tensor | None = None  # [W * S]
        self._after: Sequence[torch.Tensor] | None = None  # of a gather that was asked for and not issued
        # one for good: each new one would be computed in each step
        self._nothing = torch.empty(0, dtype=self._dtype, device="cpu").to(self._device)

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data if self._full is None else self._full

    def attach(self) -> None:
        self._reveal()
        self._give_back()

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        """Asks for values, once ``after`` is computed: :func:`gather_together` issues it, or :meth:`finish`."""
        self._after = after
        self.state = GATHERING

    def finish(self) -> None:
        gather_together([self])
        super().finish()

    def _show_gathered(self, values: torch.Tensor) -> None:
        self._full = values
        self._reveal()
        self.show(values)

    def _give_back(self, until_backward: bool = False) -> None:
        self._full, self.state = None, RELEASED
        self._conceal()
        for original in self._originals:
            original.param.__class__ = original.kind  # a released one can't be changed
            set_data(original.param, self._nothing)
            original.param.__class__ = ReleasedParameter


_SMALL = 2**20  # bytes, gathered, up to which a copy costs less than a message
_MOST = 8  # kept for one store; forwards may differ


def start_together(stores: Sequence[Store], after: Sequence[torch.Tensor]) -> None:
    """Starts several (collective); what can be travels as one message, see [Note: joined gathers]."""
    joined: dict[object, list[Stored]] = {}
    for store in stores:
        flat = store._flat
        is_here = flat.param.device == store._device or store.landing is not None
        is_here = is_here and flat.on_gather is None and flat.host is None
        if isinstance(store, Stored) and store.joins is not None and is_here:
            joined.setdefault(store.joins, []).append(store)
        else:
            store.start(after)
    for alike in joined.values():
        first, numel = alike[0], sum([store._layout.padded_numel for store in alike])
        is_small = numel * first._dtype.itemsize <= _SMALL
        if len(alike) > 1 and (is_small or first._over is not first._channel):
            first.joined(*alike).start()
        else:
            for store in alike:
                store.start()
    gather_together(stores)


class Joined:
    """The shards of one or more stores as one message, [W, sum of S], of which each store copies its part."""

    def __init__(self, stores: tuple[Stored, ...]) -> None:
        first, sizes = stores[0], [store._layout.shard_numel for store in stores]
        self._stores, self._backend, self._waiting = stores, first._backend, 0
        world_size = first._group.world_size
        # made when first needed, maybe in an evaluation; used in training, too
        with torch.inference_mode(False):
            self._full = torch.empty(world_size * sum(sizes), dtype=first._dtype, device=first._device)
            self._own = own_part(self._full, first._group)
            self._parts = torch.split_with_sizes(self._full.view(world_size, -1), sizes, dim=1)
        self._backend.release_storage(self._full)

    def start(self) -> None:
        """Issues one gather for all (collective)."""
        stores, first = self._stores, self._stores[0]
        for store in stores:
            store.state = GATHERING
        self._backend.take_storage(self._full)
        self._waiting = len(stores)
        label = first._flat.label
        if len(stores) == 1:
            self._own.copy_(first.sent())  # casts, and comes from the host
        else:
            torch.cat([store.sent().to(first._device) for store in stores], out=self._own)  # casts
            label = f"{label} and {len(stores) - 1} more"
        work = first._gather(self._full, self._own, async_op=True, label=label)
        for store, part in zip(stores, self._parts, strict=True):
            store.in_flight, store.arrives_in = (work, part), self

    def leave(self) -> None:
        """Notes that one of them has copied its part."""
        self._waiting -= 1
        if not self._waiting:
            self._backend.release_storage(self._full)


def gather_together(stores: Sequence[Store]) -> None:
    """Issues what these were asked for: one collective for each group and dtype."""
    alike: dict[object, list[Lazy]] = {}
    for store in stores:
        if isinstance(store, Lazy) and store._after is not None:
            flat = store._flat
            alone = None if flat.on_gather is None else flat
            key = flat.group, flat.param.dtype, flat.param.device, store._dtype, store._device, alone
            alike.setdefault(key, []).append(store)
    for together in alike.values():
        _gather(together)


def _gather(stores: Sequence[Lazy]) -> None:
    first, flat = stores[0], stores[0]._flat
    shards = [store._flat.param.data.view(-1) for store in stores]
    sent = torch.cat(shards) if len(shards) > 1 else shards[0].clone()  # a value of its own: tying changes it
    first._backend.tie([sent, *(first._after or ())])
    sent = sent.to(device=first._device, dtype=first._dtype)
    world_size = flat.group.world_size
    full = sent.new_empty(world_size * sent.numel())  # [W * sum of S]
    label = flat.label if len(stores) == 1 else f"parameters of {flat.paths[0] or 'the root'}"
    work = first._channel.all_gather_into(full, sent, async_op=True, label=label)
    parts = [full]
    if len(stores) > 1:
        sizes = [shard.numel() for shard in shards]
        parts = [part.reshape(-1) for part in full.view(world_size, -1).split(sizes, dim=1)]
    for store, part in zip(stores, parts, strict=True):
        store._after = None
        store.in_flight = work, part


@final
class Whole(Store):
    """Original parameters are views of the shard, for good; states only say whether a unit uses them."""

    _pointer = 0

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data.reshape(-1)

    def show(self, values: torch.Tensor) -> None:
        """Makes them views of this, and notes where it is."""
        super().show(values)
        if self._backend.has_storage:
            self._pointer = values.data_ptr()

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERED
        self._reveal()
        if not self._backend.has_storage or self._flat.param.data.data_ptr() != self._pointer:
            self.show(self.gathered)  # somebody put another tensor in

    def _conceal(self, is_gone: bool = False) -> None:
        """Guards gradients alone: what is read of values is true, and what is written to them is kept."""
        for original in self._originals:
            original.param.__class__ = original.of_shard
        if self._flat.lists_dtensors:
            self._be_attributes(False)

    def _give_back(self, until_backward: bool = False) -> None:
        self._conceal()
        self.state = RELEASED


@final
class Deferred(Store):
    """Original parameters have shapes and never values; states only say whether a unit uses them."""

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self._full = torch.empty(self._layout.padded_numel, dtype=self._dtype, device="meta")

    @property
    def gathered(self) -> torch.Tensor:
        return self._full

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERED
        if self._flat.lists_dtensors:
            self._be_attributes(True)

    def lock(self) -> None:
        """Does nothing: there is nothing that could be read or written."""

    def _give_back(self, until_backward: bool = False) -> None:
        self.state = RELEASED
        if self._flat.lists_dtensors:
            self._be_attributes(False)


def store_for(flat: FlatParam, before: Store | None) -> Store:
    """Returns the store for where the shard is now; ``before``, the last one, if it can serve on."""
    backend, kind = flat.group.backend, flat.originals[0].store
    if flat.param.is_meta and backend.device_type != "meta":  # a backend that counts serves meta tensors
        kind = Deferred
    elif kind is None and flat.is_whole:
        kind = Whole
    elif kind is None and flat.param.device.type in ("cpu", "meta"):
        kind = flat.offloaded
    kind = kind or (Stored if backend.has_storage else Lazy)
    return before if type(before) is kind and before.fits() else kind(flat)
