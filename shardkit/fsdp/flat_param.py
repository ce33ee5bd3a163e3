"""Parameters of one unit as one flat parameter of which each rank keeps a shard.

Legend: W world size, N numel of all original parameters, S shard numel (N / W rounded up).

[Note: original parameters] The parameters of the wrapped module stay what they are: leaf tensors, the same objects,
reached as attributes of their modules. Only their data moves: they are views of one buffer [W * S] whose memory exists
while the unit is gathered (``originals.py``: what they are meanwhile). So autograd sees no reshaping, their gradients
are their own, a weight used in two units stays one weight, and whoever kept a reference to a parameter (an RNN, a hook,
a metric) keeps the right one. What ``parameters()`` lists is the shard, or views of it.

[Note: memory] Where the values are is the store's (:class:`Store`), which has kinds, chosen once: tensors own memory
that is taken and released, execution is lazy, one rank has everything, or values come later. What they are at a time
is its state.

[Note: registered shards] A flat parameter travels, and modules list what is in it. One that is listed as such has one
registered parameter, its shard [S]. Otherwise each original parameter has one of its own under its name: this rank's
part of it, a view of the shard, in the shape of rows where the layout keeps rows. Its gradient is a view of the shard's
gradient. Such a flat parameter's ``param`` is a shard that no module lists (:class:`UnlistedShard`).

Memory is the truth: before values are gathered, registered parameters whose memory somebody replaced (``p.data = ...``,
``module.to()``) are copied into the shard and become views of it again.

States of a store follow each other so, which a test holds

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
autograd's then, nothing is new; else the attributes of the unit's modules are looked through. Between steps, where no
graph needs the memory, one look at all objects finds views that a program keeps anywhere (from torch 2.10 on).

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
import contextlib
import gc
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain, compress, islice, repeat, zip_longest
from operator import attrgetter, is_, lt, or_
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from ..backend import DONE, Backend, Copy, Group, Work
from ..errors import ConfigurationError, LifecycleError
from ..flattening.wrapper import FlatParameter
from ..layout import Listed, PackedLayout, ShardLayout
from ..optimizers.shards import changed_by_steps, listing_of, note_listings, shard_behind
from ..policy import ReducePolicy
from ..reduction.compression import ChangedParts, CompressedGather, format_for
from ..reduction.shard_gradients import RowlessGradient, StandingGradient, gradient_class, is_clipping, mark
from ..torch_seams.hooks import NO_BACKWARD, check_asked_gradients, current_backward, versions_given_back
from ..torch_seams.tensors import (
    as_parameter,
    as_plain,
    at_offset_0,
    dtensor_of,
    is_dtensor,
    local_of,
    of_dtensors,
    part_here,
)
from ..tracing.ranges import UNNAMED, Ranges
from ..types import AnyCallable, StateDict, Tree
from .originals import (
    GatheredParameter,
    OriginalParameter,
    Place,
    ReleasedParameter,
    ReleasedView,
    as_tensors,
    backward_when_summoned,
    both,
    hide,
    kept_views,
    known_originals,
    mesh_of,
    note_originals,
    refuse_meta,
    register,
    set_data,
    show,
    unregister,
    without_values,
    written_original,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .state import ShardingState


# ------------------------------------------------------------ where the values are
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
        self._of_rank = [[place[rank] for place in self._places] for rank in (0, 1)[: self._world_size]]
        self._in_runs = layout.runs > 1

    def unpack(self, rows: torch.Tensor, rank: int | None = None) -> None:
        """Copies what was gathered, [W, S] or [W * S] rank by rank, or what one of two ranks has, [S], at once."""
        places = self._places if rank is None else self._of_rank[rank]
        if rank is None and rows.dim() == 1:
            rows = rows.view(self._world_size, -1)
        if not self._in_runs:
            torch.split_with_sizes_copy(rows, self._sizes, dim=-1, out=places)
            return
        parts = torch.split_with_sizes(rows, self._sizes, dim=-1)
        shaped = [part.view(place.shape) for part, place in zip(parts, places, strict=True)]
        torch._foreach_copy_(places, shaped)


def unpacked(gathered: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Puts items in their places, of values gathered rank by rank, [W * S]."""
    if len(layout.blocks) == 1 and layout.runs == 1:
        return gathered
    made = torch.empty_like(gathered)
    Unpacking(layout, made).unpack(gathered)
    return made


_param_of, _version_of, _local_of_param = map(attrgetter, ("param", "param._version", "param._local_tensor"))
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
        kept_views: those of its memory, where that is given back after use.
        copied: version, memory and some numbers of the shard that the device has a copy of, on the host.
        landing: brings gradients to a shard on the host beside what is computed, where something does.
        away: tensors without memory, and the versions that they have with it; see [Note: given back].
    """

    keeps_shapes = True
    serves_on = False
    joins: object = None
    kept_views: KeptViews | None = None
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
        self.is_watched = False  # whether writes while it is summoned have to be known
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
        if self._flat.host is not None:
            self.in_flight = self._backend.copy_up(full, self._flat.host), full

    def _to_host(self, full: torch.Tensor) -> None:
        """Copies what was gathered, the first time, where it stays there from now on."""
        if self._flat.kept_at is not None and self._flat.host is None:
            self._flat.host = self._backend.pin(full)

    def fits(self) -> bool:
        """Says whether it can serve on after the shard's device or dtype, or the group, may have changed."""
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
        if (kept := self.kept_views) is not None and kept.found and self.state is not SUMMONED:
            kept.reveal()
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
            tensors = [*map(_param_of, self._originals), *map(_local_of_param, self._split)]
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
        if self.kept_views is not None and self._flat.modules:  # else it is new
            self.kept_views.conceal(self._flat.modules, self._lent)

    def note_data(self, number: int, data: torch.Tensor | None) -> None:
        """Notes that a program has asked for the data of an original parameter in use, or has set them (None)."""
        looks = self.is_watched if self.state is SUMMONED else self.state is GATHERED and not self.is_whole
        if self._versions and looks:
            self._seen.append((number, data, 0 if data is None else data._version))

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

    def written_since(self, versions: list[int]) -> list[int]:
        """Returns numbers of original parameters that have other versions now, or whose data were written to."""
        seen, self._seen = self._seen, []
        found = [k for k, now in enumerate(map(_version_of, self._originals)) if now != versions[k]]
        return found + [k for k, data, since in seen if data is None or data._version > since]

    def _be_attributes(self, have_values: bool) -> None:
        """Makes attributes of modules the original parameters, or what is listed: DTensors."""
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
                self._gather(full, shard, label=f"{self._flat.label} in full precision", over=self._channel)
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
_memory_of = torch._C._storage_address  # type: ignore[attr-defined]


class KeptViews:
    """The views of one flat parameter's original parameters that modules, or whoever, keep.

    Args:
        full: what original parameters are views of; other views of it are ours.
        originals: in the order of ``layout``.

    Attributes:
        memory: identifies its storage.
        found: those that were; some may be gone.
        usual: how many tensors look at the memory between steps, beside those that were found.
    """

    def __init__(
        self, full: torch.Tensor, originals: Sequence[OriginalParameter], layout: ShardLayout
    ) -> None:
        self.memory = full.untyped_storage()._cdata
        self._full = full
        self._originals = originals
        self._layout = layout
        # How many tensors looked at the memory the last time none was kept; by whether gradients were enabled, and
        # whether a backward ran.
        self._familiar: dict[tuple[bool, bool], int] = {}
        self.found: list[tuple[TensorWeakRef, type[torch.Tensor]]] = []
        self.usual = _holders_of(self.memory) + len(originals)

    def conceal(self, modules: Sequence[nn.Module], lent: Sequence[tuple[int, TensorWeakRef]]) -> None:
        """Notes that the memory is about to be given back; views may be kept by these modules, or by whoever."""
        state = (torch.is_grad_enabled(), current_backward() != NO_BACKWARD)
        now = _holders_of(self.memory)
        alive = [data for _, ref in lent if (data := ref()) is not None] if lent else []
        if not self.found and not alive and now <= self._familiar.get(state, 0):
            self._familiar[state] = now
            return
        kept = chain.from_iterable(_tensors_in(list(module.__dict__.values())) for module in modules)
        self.add(chain(alive, kept))
        if not self.found:
            self._familiar[state] = _holders_of(self.memory)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes the values from those of these tensors that are views of the memory, and from what was found before."""
        found = {id(t): (ref, kind) for ref, kind in self.found if (t := ref()) is not None}
        own = {id(t) for original in self._originals for t in (original.param, local_of(original.param))}
        for tensor in tensors:
            if id(tensor) in own or id(tensor) in found or tensor is self._full or tensor._base is self._full:
                continue  # ours
            if torch._C._has_storage(local := local_of(tensor)) and _memory_of(local) == self.memory:
                found[id(tensor)] = (TensorWeakRef(tensor), type(tensor))
        self.found = list(found.values())
        starts = sorted((start, k) for k, start in enumerate(self._layout.offsets()))
        with as_tensors():
            for ref, _ in self.found:
                view: Tree = ref()
                offset = int(local_of(view).storage_offset())
                number = starts[max(0, bisect.bisect_right(starts, (offset, math.inf)) - 1)][1]
                kept_views[view] = known_originals[id(self._originals[number].param)][1:]
                kind = ReleasedParameter if isinstance(view, nn.Parameter) else ReleasedView
                view.__class__ = without_values(kind, view)

    def reveal(self) -> None:
        """Notes that the memory is back."""
        for ref, kind in self.found:
            if (tensor := ref()) is not None:
                tensor.__class__ = kind


def find_kept_views(flats: Sequence[FlatParam]) -> None:
    """Finds views that a program keeps anywhere, where more tensors than usual look at memory that no graph needs.

    It looks at all objects that there are (some 50 ms): not again for as many as a look has not explained.
    """
    suspects = []
    for flat in flats:
        views = flat.store.kept_views
        if views is None or flat.store.state not in (RELEASED, KEPT):
            continue
        if _holders_of(views.memory) - len(views.found) > views.usual:
            suspects.append(views)
    # before torch 2.10 a tensor that C++ alone holds may come to its end while it is looked at here
    if suspects and torch.__version__ >= "2.10":
        with as_tensors():
            tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
            for views in suspects:
                views.add(tensors)
                views.usual = max(views.usual, _holders_of(views.memory) - len(views.found))  # a graph's, say


def _tensors_in(values: Tree, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yields all tensors in nested lists, tuples, sets and dicts, and what derives from these; not deeper: cycles."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | set) and depth:
            yield from _tensors_in(list(value.values()) if isinstance(value, dict) else value, depth - 1)


class Stored(Store):
    """One buffer whose memory is taken for gathering and given back; views of it come back to life with it.

    Such views are the original parameters, and what autograd saved of them.
    """

    kept_views: KeptViews
    serves_on = True  # views of the memory may be saved for backward
    _unpack_rank: Callable[[torch.Tensor, int], None] | None = None

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
            self._unpack = self._unpack_rank = Unpacking(self._layout, full).unpack
        self.kept_views = KeptViews(full, self._originals, self._layout)
        self.memory = self.kept_views.memory

    @property
    def gathered(self) -> torch.Tensor:
        return self._full

    def attach(self) -> None:
        self.summoned = None
        if not self._full.untyped_storage().nbytes():  # it is not new
            self._backend.take_storage(self._full)
        self._reveal()
        self.show(self._full)
        Stored._give_back(self)

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
                if flat.on_gather is not None:  # here, for it would cost a call
                    flat.on_gather(full, self._own)
                work = self._over.all_gather_into(
                    full, self._own, async_op=True, label=flat.label, with_own=False
                )
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

    def _show_gathered(self, values: torch.Tensor) -> None:
        if values is not self._full:
            self._backend.take_storage(self._full)
            if self._unpack is None:
                self._rows.copy_(values)
            else:
                own = None if self.arrives_in is None else self.arrives_in.own
                with torch.no_grad():
                    if own is None or self._unpack_rank is None:
                        self._unpack(values)
                    else:
                        self._unpack_rank(values, 1 - self._group.rank)
                        self._unpack_rank(own, self._group.rank)
            if self.arrives_in is not None:
                self.arrives_in.leave()
                self.arrives_in = None
        if self._flat.keeps_on_host:
            self._to_host(self._full)
        self._reveal()

    def _give_back(self, until_backward: bool = False) -> None:
        is_there = self.state is not GATHERING and self._flat.host is None
        if until_backward and is_there and self._mesh is not None:
            self._kept = own_part(self._full, self._mesh).clone()
        if not self._full.untyped_storage().resizable():  # numpy or the like has a view, and keeps the memory
            self._look_at(torch.empty_like(self._full))
            self.show(self._full)
        self._conceal(True)
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

    # The shard's memory, where one of two ranks sends it from there: only the other's arrives in the message, and half
    # a unit is copied less.
    own: torch.Tensor | None = None

    def __init__(self, stores: tuple[Stored, ...]) -> None:
        first, sizes = stores[0], [store._layout.shard_numel for store in stores]
        self._stores, self._backend, self._waiting = stores, first._backend, 0
        others = [store._flat.label.partition(", unit ")[2] for store in stores[1:]]
        self._label = ", ".join([first._flat.label, *others])  # "parameters 0 of blocks.1, unit 2, 3, 4"
        world_size = first._group.world_size
        # made when first needed, maybe in an evaluation; used in training, too
        with torch.inference_mode(False):
            self._full = torch.empty(world_size * sum(sizes), dtype=first._dtype, device=first._device)
            self._part = own_part(self._full, first._group)
            rows = self._full.view(world_size, -1)
            self._parts = torch.split_with_sizes(rows, sizes, dim=1)
            of_two = world_size == 2 and len(stores) == 1 and first._unpack_rank
            self._other = rows[1 - first._group.rank] if of_two else None
        self._backend.release_storage(self._full)

    def start(self) -> None:
        """Issues one gather for all (collective)."""
        stores, first = self._stores, self._stores[0]
        for store in stores:
            store.state = GATHERING
        self._backend.take_storage(self._full)
        self._waiting = len(stores)
        parts, sent, label = self._parts, first.sent(), self._label
        self.own = None
        if len(stores) > 1:
            torch.cat([store.sent().to(first._device) for store in stores], out=self._part)  # casts
        elif self._other is not None and sent.dtype == first._dtype and sent.device == first._device:
            self.own, parts = sent, (self._other,)
        else:
            self._part.copy_(sent)  # casts, and comes from the host
        shard = self._part if self.own is None else sent
        if first._flat.on_gather is not None:
            first._flat.on_gather(self._full, shard)
        work = first._over.all_gather_into(self._full, shard, async_op=True, label=label, with_own=False)
        for store, part in zip(stores, parts, strict=True):
            store.in_flight, store.arrives_in = (work, part), self

    def leave(self) -> None:
        """Notes that one of them has copied its part."""
        self._waiting -= 1
        if not self._waiting:
            self.own = None  # else it would keep memory that a shard has no longer
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
        if self._flat.lists_dtensors:
            refuse_meta(self._flat)
        self.state = GATHERED

    def lock(self) -> None:
        """Does nothing: there is nothing that could be read or written."""

    def _give_back(self, until_backward: bool = False) -> None:
        self.state = RELEASED


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


# ------------------------------------------------------------ what travels, and what modules list of it
_AS_IT_IS, _name_of = ReducePolicy(), attrgetter("name")

Registered: TypeAlias = "FlatParam | RegisteredShard"
"""Says for what a registered parameter is listed: all of a flat parameter, or one original parameter of it."""

_grad_of, _address_of, _local_of = attrgetter("grad"), torch.Tensor.data_ptr, attrgetter("_local_tensor")
_storage_of = torch.Tensor.untyped_storage  # of a DTensor empty, and all that setting its ``data`` replaces
_offset_of, _shape_of = attrgetter("offset"), attrgetter("shape")
_hooks_of, _later_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@contextlib.contextmanager
def _refuse_shards(inputs: Sequence[torch.Tensor], accumulate: bool) -> Iterator[None]:
    """Raises LifecycleError where a backward is asked for gradients of shards."""
    for asked in inputs:
        if (listing := listing_of(asked)) is not None:
            raise LifecycleError(
                f"rank {listing.group.ranks[listing.group.rank]}: torch.autograd.grad and backward(inputs=...) can't "
                f"give gradients of an FSDP module's parameters() (here of {listing.label or listing.names[0]!r}): "
                "these are shards, which autograd never sees. Call loss.backward() without inputs= and read their .grad"
            )
    yield


def no_values(numel: int, like: torch.Tensor) -> torch.Tensor:
    """Stands for a shard [S] that is not in memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(numel)


class RegisteredShard:
    """One original parameter of a flat parameter as modules list it: this rank's part.

    It answers for this parameter what a flat parameter that is listed as such answers for all in it.

    Attributes:
        flat: the flat parameter.
        first: number of the original parameter in it.
        original, originals: the original parameter.
        places: where it is listed; in units that borrow it, too.
        position: of the original parameter among those of the module.
        param: what modules list: an ordinary parameter, or a DTensor.
        layout: how the original parameter alone is cut between ranks.
        offset: where the part begins in the shard.
        shape: of what is listed here; of a DTensor, of its local tensor.
        spec: of the DTensor; None where an ordinary parameter is listed.
        standing: its gradient, where that stands for this rank's own.
    """

    standing: StandingGradient | None = None
    has_loaded = False  # values, on this rank alone maybe, since the last step

    def __init__(
        self, flat: FlatParam, number: int, listed: Listed, values: torch.Tensor, spec: DTensorSpec | None
    ) -> None:
        self.flat, self.first = flat, number
        self.original = original = flat.originals[number]
        self.is_told = issubclass(original.kind, GatheredParameter)  # when that is frozen or unfrozen
        self.originals, self.places, self.position = [original], original.places, original.position
        self.layout, self.offset, self.shape = listed
        self.numel = numel = math.prod(self.shape)
        self.spec = spec
        part = original.part if original.is_apart else values.narrow(0, self.offset, numel).view(self.shape)
        with as_tensors():
            trains = original.param.requires_grad
        self.param = (
            nn.Parameter(part, trains) if spec is None else as_parameter(dtensor_of(part, spec), trains)
        )
        for module, name in self.places:  # where the original parameter was; that is an attribute from now on
            module._parameters[name] = self.param
            if spec is None:
                module.__dict__[name] = original.param

    @property
    def names(self) -> list[str]:
        """Names its path in the unit's module."""
        return [self.flat.names[self.first]]

    @property
    def label(self) -> str:
        return f"parameter {self.names[0]!r} of {self.flat.label.partition(' of ')[2]}"

    @property
    def group(self) -> Group:
        """Returns the ranks that share it."""
        return self.flat.group

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part in the shard's values, or gradients, [S]: a view in the shape that is listed."""
        return values[self.offset : self.offset + self.numel].view(self.shape)

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "spec": None, "standing": None}  # that of the DTensor

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self.spec = self.param._spec if is_dtensor(self.param) else None

    def local(self, listed: torch.Tensor) -> torch.Tensor:
        """Returns the memory of what is listed, or of a gradient of it, on this rank."""
        return listed if self.spec is None else local_of(listed)

    @property
    def is_copy(self) -> bool:
        """Says whether a rank before this one has the same part."""
        mesh = mesh_of(self.flat.originals)
        at = () if mesh is None else mesh.get_coordinate() or ()
        within = self.original.within
        cut = [placement.is_shard() for placement in (() if within is None else within.placements)]
        is_repeated = any(rank and not is_cut for rank, is_cut in zip_longest(at, cut))
        return is_repeated or (self.layout.copies and self.group.rank > 0)


class RegisteredShards:
    """Holds those of one flat parameter.

    Attributes:
        each: in the order of the original parameters.
        params: what is listed for each.
        versioned: tensors whose versions change with every change of these.
        are_dtensors: modules list DTensors.
        has_copies: every rank has all of some of them.
    """

    def __init__(self, flat: FlatParam, shard: torch.Tensor, mesh: DeviceMesh | None) -> None:
        self.each: list[RegisteredShard] = []
        self.are_dtensors, self._are_apart = mesh is not None, flat.originals[0].is_apart
        # where DTensors' gradients were last, at offsets that they don't tell
        self._gradients: StorageWeakRef | None = None
        self._made: tuple[StorageWeakRef, list[bool]] | None = None  # with zeros for those that had none
        listed = flat.layout.listed(list(map(_shape_of, flat.originals)), flat.group.rank)
        for number, (original, one) in enumerate(zip(flat.originals, listed, strict=True)):
            spec = None
            if mesh is not None:
                dtensor = part_here(shard, mesh, original.shape, original.within, original.dim)
                spec, one = dtensor._spec, one._replace(shape=tuple(dtensor._local_tensor.shape))
            self.each.append(RegisteredShard(flat, number, one, shard, spec))
        self._note_cut(shard.numel())
        self._note_memory(shard)

    def leave_out(self, number: int) -> None:
        """Gives up one of them, whose values are in memory of its own from now on; the others' move with the next."""
        gone = self.each.pop(number).param
        gone._local_tensor = at_offset_0(gone._local_tensor.detach().clone())  # type: ignore[attr-defined]
        flat = self.each[0].flat
        listed = flat.layout.listed(list(map(_shape_of, flat.originals)), flat.group.rank)
        for k, (r, one) in enumerate(zip(self.each, listed, strict=True)):
            r.first, r.layout, r.offset = k, one.layout, one.offset
        self._note_cut(flat.layout.shard_numel)

    def _note_cut(self, shard_numel: int) -> None:
        # how a shard [S] is cut for all gradients: into what is listed, and what is between
        self._split = [0]
        # of which part, in which shape
        self._parts: list[tuple[int, tuple[int, ...]]] = []
        self.has_copies, end = False, 0
        places: dict[int, int] = {}
        for r in sorted(self.each, key=_offset_of):
            if r.numel:
                self._split += [r.offset - end, r.numel]
                places[r.first], end = len(self._split) - 1, r.offset + r.numel
            self.has_copies = self.has_copies or bool(r.layout.copies) or r.original.mesh is not None
        self._split.append(shard_numel - end)
        self._rowless: list[int] = []  # DTensors of which the last rank has nothing
        for k, r in enumerate(self.each):
            self._parts.append((places.get(r.first, 0), r.shape))
            cut = r.layout
            ends_before = cut.shard_numel * (cut.world_size - 1) >= cut.numels[0]
            if ends_before and self.are_dtensors and not cut.copies:
                self._rowless.append(k)

    def __getstate__(self) -> StateDict:
        """Returns what a copy or a file takes: tensors that registered parameters have are theirs alone."""
        gone = ("params", "_locals", "_storages", "versioned", "_addresses", "_gradients", "_made")
        return {name: value for name, value in self.__dict__.items() if name not in gone}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self.params = list(map(_param_of, self.each))
        self._locals: list[torch.Tensor] = []
        self._storages: list[torch.UntypedStorage] = []
        self._gradients = self._made = None

    def _note_memory(self, shard: torch.Tensor) -> None:
        self.params = list(map(_param_of, self.each))
        self._locals = list(map(_local_of, self.params)) if self.are_dtensors else self.params
        self.versioned = [*self.params, *self._locals, shard] if self.are_dtensors else self.params
        has_memory = not shard.is_meta and not self._are_apart
        self._addresses = list(map(_address_of, self._locals)) if has_memory else []
        self._storages = list(map(_storage_of, self.params)) if has_memory and self.are_dtensors else []

    # ------------------------------------------------------------ values
    def are_views(self) -> bool:
        """Says whether nobody has replaced the memory of a registered parameter."""
        # torch swaps what is in a DTensor
        now = map(_local_of, self.params) if self.are_dtensors else self._locals
        if not self._addresses:
            return all(map(is_, now, self._locals))
        is_set = not all(map(is_, self._storages, map(_storage_of, self.params)))  # ``data``, see collected
        return not is_set and list(map(_address_of, now)) == self._addresses

    def are_alike(self) -> bool:
        """Says whether what modules list now is of one dtype and device: not while some modules have moved."""
        now = [module._parameters.get(name) for module, name in (r.places[0] for r in self.each)]
        return len({(p.dtype, p.device) for p in now if p is not None}) == 1

    @torch.no_grad()
    def collected(self, numel: int) -> torch.Tensor:
        """Returns a shard [S] with their values; they become views of it.

        Raises:
            LifecycleError: some of them have got memory, and others are on the meta device; ``data`` of some was set.
        """
        for r, p, local, storage in zip(self.each, self.params, self._locals, self._storages, strict=False):
            if p._local_tensor is local and _storage_of(p) is not storage:
                self._storages = list(map(_storage_of, self.params))  # once: training can go on
                raise LifecycleError(
                    f"setting data of {r.label}, a DTensor, changes no values: p.copy_() under no_grad does"
                )
        for r in self.each:
            module, name = r.places[0]
            now = module._parameters.get(name)
            if now is not None and now is not r.param and r.local(now).numel() == r.numel:
                r.param = now  # replaced by torch, where a tensor can't change its device or class
                for place in r.places:
                    register(place, now)
        values = [r.local(r.param.detach()) for r in self.each]
        if any(value.is_meta for value in values) and not all(value.is_meta for value in values):
            raise filled_by_parts(self.each[0])
        shard = no_values(numel, values[0]) if self._are_apart else values[0].new_zeros(numel)
        for r, value in zip(self.each, values, strict=True):
            if r.original.is_apart:
                r.original.part, r.spec = r.local(r.param), r.param._spec  # type: ignore[attr-defined]
                continue
            part = r.part(shard)
            if not shard.is_meta:
                part.copy_(value)
            if r.spec is None:
                r.param.data = part
            else:
                r.param._local_tensor = at_offset_0(part)  # type: ignore[attr-defined]
                r.spec = r.param._spec  # type: ignore[attr-defined]
        self._note_memory(shard)
        return shard

    # ------------------------------------------------------------ gradients
    def gradient(self) -> torch.Tensor | None:
        """Returns the shard's [S], of which theirs are views; made anew where they are not. None: none has one."""
        now = list(map(_grad_of, self.params))
        there = [(r, g) for r, g in zip(self.each, now, strict=True) if g is not None]
        if not there:
            return None
        own = self._common(there)
        if own is not None and len(there) == len(now):
            return own
        had = [g is not None for g in now]
        # in other memory the others may have what was left of gradients that are cleared
        if own is not None and self._made == (StorageWeakRef(own.untyped_storage()), had):
            return own
        like = self.each[0].flat.param
        made = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        standing: list[tuple[Tree, StandingGradient]] = [
            (r.param, r.standing) for r, _ in there if r.standing is not None and r.standing.stands(r.param)
        ]
        for r, g in there:
            with as_plain():
                r.part(made).copy_(r.local(g))
        kind = next((type(g) for r, g in there if r.spec is None), torch.Tensor)
        self._show(made, had, kind)
        for param, one in standing:
            one.stand(param, param.grad)
        self._made = StorageWeakRef(made.untyped_storage()), had
        return made

    def _common(self, there: Sequence[tuple[RegisteredShard, torch.Tensor]]) -> torch.Tensor | None:
        """Returns the gradient of the shard, [S], that these are parts of; nothing is kept of it, it goes with them."""
        locals_ = [(r.offset, r.local(g)) for r, g in there if r.numel]
        if not locals_:
            return None
        offset, first = locals_[0]
        with as_plain():
            memory: torch.UntypedStorage | None = first.untyped_storage()
            if self._gradients is not None:
                memory = torch.UntypedStorage._new_with_weak_ptr(self._gradients.cdata)  # type: ignore[attr-defined]
            if memory is None:
                return None
            size, numel = first.element_size(), there[0][0].flat.layout.shard_numel
            begin = first.data_ptr() - offset * size
            for offset, g in locals_:
                if (
                    g.data_ptr() != begin + offset * size
                    or g.dtype is not first.dtype
                    or not g.is_contiguous()
                ):
                    return None
            at = begin - memory.data_ptr()
            if not 0 <= at <= memory.nbytes() - numel * size:
                return None  # it has other memory now: ``module.to()`` sets a gradient's ``data``
            own = torch.empty(0, dtype=first.dtype, device=first.device).set_(
                memory, at // size, (numel,), (1,)
            )
        if type(first) is not torch.Tensor:
            own.__class__ = type(first)  # its other parts are on other ranks, too
        return own

    def local_gradients(self, padded: bool = True, copies: bool = True) -> list[torch.Tensor]:
        """Returns this rank's memory of theirs, as far as they have one.

        Args:
            padded: with padding.
            copies: with those that ranks before this one have, too.
        """
        found = []
        for r in self.each:
            if r.param.grad is not None and r.numel and (copies or not r.is_copy):
                local = r.local(r.param.grad)
                padding = 0 if padded or r.spec is not None else r.layout.padding(r.group.rank)
                found.append(local if not padding else local[: r.numel - padding])
        return found

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Theirs become views of this [S]; or are cleared."""
        if value is None:
            for p in self.params:
                p.grad = None
        else:
            self._show(value, [True] * len(self.each), torch.Tensor)

    def _show(self, gradient: torch.Tensor, had: Sequence[bool], kind: type[torch.Tensor]) -> None:
        for p, g in zip(self.params, self._views(gradient, had, kind), strict=True):
            p.grad = g

    def _views(
        self, gradient: torch.Tensor, had: Sequence[bool], kind: type[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        parts = torch.split_with_sizes(gradient, self._split)
        views: list[torch.Tensor | None] = [
            (parts[k] if len(shape) == 1 else parts[k].view(shape)) if h else None
            for h, (k, shape) in zip(had, self._parts, strict=True)
        ]
        if self.are_dtensors:
            self._gradients = StorageWeakRef(gradient.untyped_storage())
            for k, r in enumerate(self.each):
                view = views[k]
                if r.spec is not None and view is not None:
                    views[k] = dtensor_of(view, r.spec)
        self._mark(views, kind)
        return views

    def _mark(self, gradients: Sequence[torch.Tensor | None], kind: type[torch.Tensor]) -> None:
        mark(gradients, kind)
        mark([gradients[k] for k in self._rowless], RowlessGradient)

    def hand_over(self, gradient: torch.Tensor, had: Sequence[bool], kind: type[torch.Tensor]) -> None:
        """Adds to their gradients, as autograd would: through hooks, which autograd never calls for them.

        Args:
            gradient: the shard's, [S].
            had: for each, whether some rank had one.
            kind: class of gradients whose other parts are on other ranks.
        """
        unused = self.each[0].flat.unused
        before = list(map(_grad_of, self.params))
        unused.note(had, [g is None for g in before])
        there = [(r, g) for r, g in zip(self.each, before, strict=True) if g is not None]
        hooked = any(map(_hooks_of, self.params))
        may_add = len(there) == len(before) and not hooked and False not in had
        own = self._common(there) if may_add else None
        if own is not None:
            with as_plain():
                own.add_(gradient)
            # one that stood for a gradient under ``no_sync`` was this rank's own, and plain
            mark(before, kind)
        elif there or hooked:
            for p, view in zip(self.params, self._views(gradient, had, kind), strict=True):
                if view is not None:
                    add_gradient(p, view, kind)
            self._mark(list(map(_grad_of, self.params)), kind)
        else:
            self._show(gradient, had, kind)
        for r, _ in there:
            if unused.originals[r.first]:
                r.param.grad = None  # zeros that stood for gradients under ``no_sync`` which never came
        if any(map(_later_hooks_of, self.params)):
            for p, h in zip(self.params, had, strict=True):
                for after in (p._post_accumulate_grad_hooks or {}).values() if h else ():
                    after(p)


def add_gradient(
    param: torch.Tensor, gradient: torch.Tensor, kind: type[torch.Tensor], is_last: bool = False
) -> None:
    """Adds to a shard's gradient, as autograd would: through hooks, which autograd never calls for it.

    Args:
        gradient: of so many elements.
        kind: class of gradients whose other parts are on other ranks.
        is_last: hooks for when the gradient is there are called, too.
    """
    if gradient.shape != param.shape:
        gradient = gradient.view(param.shape)
    for hook in (param._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if param.grad is None:
        param.grad = gradient
    else:
        with as_plain():
            param.grad.add_(gradient)
    mark([param.grad], kind)
    for after in (param._post_accumulate_grad_hooks or {}).values() if is_last else ():
        after(param)


def filled_by_parts(listing: Registered) -> LifecycleError:
    """Says that modules inside have left the meta device where that can't be followed."""
    return LifecycleError(
        f"rank {listing.group.ranks[listing.group.rank]}: modules in the unit of {listing.label} have left the meta "
        "device one by one, and not all of them, or after a forward. Call to_empty(device=...) of the FSDP module, or "
        "of each module in it, before the first forward"
    )


class UnlistedShard(nn.Parameter):
    """A shard [S] that no module lists: modules list the original parameters' parts of it."""

    shards: RegisteredShards

    @classmethod
    def of(cls, values: torch.Tensor, shards: RegisteredShards) -> UnlistedShard:
        """Makes it of these values, [S]."""
        made: UnlistedShard = torch.Tensor._make_subclass(cls, values.detach(), False)
        made.shards = shards
        return made

    # the gradient of which those of registered parameters are views, [S]
    grad: Any = property(lambda self: self.shards.gradient(), lambda self, new: self.shards.set_gradient(new))

    def requires_grad_(self, requires_grad: bool = True) -> UnlistedShard:
        """Sets it of all registered parameters."""
        for p in self.shards.params:
            p.requires_grad_(requires_grad)
        return self

    # whether any registered parameter does
    requires_grad: Any = property(
        lambda self: any(p.requires_grad for p in self.shards.params),
        requires_grad_,  # type: ignore[arg-type]
    )


def flat_changed_by(listed: torch.Tensor) -> FlatParam | None:
    """Finds the flat parameter whose shard the step of an optimizer that lists this tensor changes."""
    shard = changed_by_steps(listed)
    if isinstance(shard, UnlistedShard):
        return shard.shards.each[0].flat
    listing = listing_of(shard)
    return None if listing is None else listing.flat  # type: ignore[no-any-return]


# Flat parameters of whose shards a program has asked how many dimensions they have: to make groups by it, mostly.
dimensions_asked: weakref.WeakSet[FlatParam] = weakref.WeakSet()


class ShardedFlatParameter(FlatParameter):
    """A flat parameter's shard. The attributes are those that existing code reads from fairscale's parameters."""

    ndim = property(lambda self: self.dim())

    def dim(self) -> int:
        """Returns 1, whatever the original parameters have; see :data:`dimensions_asked`."""
        if (flat := shard_behind(self)) is not None:
            dimensions_asked.add(flat)
        return super().dim()

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """Freezes or unfreezes all that is in it, also where it looks so already, as a part of it does."""
        with as_tensors():
            for original in self._flat.originals:
                original.param.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def _flat(self) -> FlatParam:
        flat: FlatParam | None = shard_behind(self)
        if flat is None:
            raise AttributeError("this parameter was part of an FSDP module that is gone")
        return flat

    _is_sharded = property(lambda self: self._flat.group.world_size > 1)
    _orig_size = property(lambda self: torch.Size([self._flat.layout.numel]))
    _cpu_grad = property(lambda self: self.grad if self.device.type == "cpu" else None)
    _fp32_shard, _saved_grad_shard = property(attrgetter("data")), property(attrgetter("grad"))
    _is_shared, _fp16_shard = False, None  # shards are cast on their way into the gathered flat parameter
    # that one, [W * S]; without memory while the unit is not gathered
    _full_param_padded = property(attrgetter("_flat.store.gathered"))


class UnusedShard(ShardedFlatParameter):
    """A shard for which a backward has left nothing here, whatever others got. To read its gradient costs calls."""

    def _gradient(self) -> torch.Tensor | None:
        """Returns its gradient; torch's clipping gets zeros where others alone may have some, to meet them."""
        gradient = super().grad
        flat = shard_behind(self) if gradient is None else None
        if flat is not None and flat.unused.is_noted and not flat.is_asleep and is_clipping():
            gradient = torch.zeros_like(self.detach())
            gradient.__class__ = flat.gradient_class
        return gradient

    grad: Any = property(_gradient, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__)  # type: ignore


class Unused:
    """Knows which original parameters have had no gradient since the shard's gradient was cleared.

    Attributes:
        originals: for each, whether it had none; before the first backward all are taken to have had one. Where
            execution is lazy that is data, and this is what this rank knows of its own.
        used: there, [S]: true for elements of this rank's shard that have had one; None if all have.
        is_noted: a backward has left a gradient of one on some rank since the last step.
    """

    def __init__(self, count: int) -> None:
        self.originals = [False] * count
        self.used: torch.Tensor | None = None
        self.is_noted = False

    def clear(self, used: torch.Tensor | None) -> None:
        """Notes that the gradient is new: none has had one yet; ``used`` says so for elements, if execution is lazy."""
        self.originals = [True] * len(self.originals)
        self.used = used

    def note(self, had: Sequence[bool], are_new: Iterable[bool]) -> None:
        """Notes that these have got a gradient: for each, whether it is the first since it was cleared."""
        self.is_noted |= True in had
        # none had it, and none before, or it is new: bools are in order, and no call of Python's is made
        self.originals = list(map(lt, had, map(or_, self.originals, are_new)))

    def note_elements(self, used: torch.Tensor | None, had: Sequence[bool], is_new: bool) -> None:
        """Notes the same for elements, [S]; None if all have got one. ``had`` is what this rank knows."""
        self.note(had, repeat(is_new))
        if is_new:
            self.used = used
        elif self.used is not None:
            self.used = None if used is None else self.used | used


class FlatParam:
    """Original parameters of one dtype, sharded evenly as one flat parameter.

    Args:
        originals: in the order in which they lie in it.
        shard: this rank's, [S], in full precision; where it is listed a parameter, as the optimizer sees it.
        places: where that is; none where original parameters are listed one by one.
        mesh: over which these are listed as DTensors, if they are.
        layout: where original parameters and shards lie.
        state: of the module: its groups and options.
        own_dtype: while gathered, where options name none; None for the shard's own.

    Attributes:
        names: path of each in the unit's module.
        left_out: homes and names of parameters that others have taken the place of.
        group: ranks that share it.
        post_forward_mesh: ranks, this one among them, that can keep the values between them after forward.
        compression: of what is gathered.
        offloaded: the store where the shard is on the host; None for that of the device's shards.
        sends_changes: of what ranks have received before, only what has changed since is gathered.
        compute_dtype: of what is gathered; complex numbers and integers stay what they are.
        compute_device: of the original parameters while gathered.
        is_whole: this rank's shard has all values, as they are computed with.
        shards: what modules list for the original parameters; None where ``param`` is listed.
        listings: what registered parameters are listed for: itself, or its original parameters one by one.
        versioned: tensors whose versions change with every change of the shard.
        lists_dtensors: these are DTensors.
        trainable: for each original parameter, whether it is, as far as its unit knows.
        trains: any is, and gradients are reduced for it.
        reduce: how, as its unit says.
        label: what it is called in errors.
        paths: of the unit's modules in the root module, as far as they are known.
        ranges: the unit's.
        store: where its values are, and in which state.
        is_borrowed: units of other modules need original parameters, too.
        modules: of the unit, where views of original parameters may be kept (see [Note: kept views]).
        unused: which original parameters have had no gradient on any rank since the gradient was last cleared.
        written: numbers of original parameters that were written to in the last time that they had values; such writes
            are lost.
        on_gather: is told of all-gathers of the values before they start, as (output, shard); of copies too.
        held_at: version of the shard whose values stay, see :meth:`hold`.
        kept_at: the same, and its memory, for frozen values that stay from step to step, see :meth:`keep`.
        keeps_on_host: they stay there, and not on the device.
        host: what has been gathered, there.
        gathers_over: what gathers values that are computed with, in place of the group's channel for parameters.
    """

    store: Store
    layout: ShardLayout
    group: Group
    post_forward_mesh: Group | None
    gathers_over: Group | None = None
    left_out: Sequence[tuple[int, str]] = ()

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        shard: torch.Tensor,
        places: Sequence[Place],
        mesh: DeviceMesh | None,
        layout: ShardLayout,
        state: ShardingState,
        own_dtype: torch.dtype | None,
    ) -> None:
        options = state.options
        self.originals = list(originals)
        self.names = list(map(_name_of, originals))
        self.places = list(places)
        self.shards: RegisteredShards | None = None
        self.listings: Sequence[Registered] = [self]
        self.trainable: list[bool] = []
        self.trains = self.lists_dtensors = self.keeps_on_host = False
        self.reduce = _AS_IT_IS
        self.group, self.layout = state.group, layout
        self.label, self.paths = "", [""]
        self.ranges: Ranges = UNNAMED
        self.is_borrowed = False
        self.unused = Unused(len(self.originals))
        self.written: list[int] = []
        self.on_gather: Callable[[torch.Tensor, torch.Tensor], object] | None = None
        self.post_forward_mesh = state.post_forward_mesh
        self.modules: Sequence[nn.Module] = ()
        self.chosen_dtype = None if originals[0].keeps_dtype else options.precision.compute or own_dtype
        self._compute_device = options.device
        self.compression, self.sends_changes = options.precision.compression, options.reshard.sends_changes
        self.offloaded = Mirrored if options.offload.masters else None
        if not places:
            self.shards = RegisteredShards(self, shard, mesh)
            self.listings, self.lists_dtensors = self.shards.each, self.shards.are_dtensors
            shard = UnlistedShard.of(shard, self.shards)
        self.param: nn.Parameter = shard  # type: ignore[assignment]
        self._settle(None)

    # ------------------------------------------------------------ what modules list
    @property
    def flat(self) -> FlatParam:
        """Returns itself: it is :data:`Registered`."""
        return self

    @property
    def gradient_class(self) -> type[torch.Tensor]:
        """Returns that of the shard's gradient."""
        in_order = self.reduce.order is not None
        return gradient_class(self.group, "the FSDP root's clip_grad_norm_", True, in_order=in_order)

    has_loaded = is_told = False
    first = position = 0  # it has all of its original parameters

    def path_of(self, number: int) -> str:
        """Returns the path in the root, as far as it is known, of the module that a parameter's name is of."""
        home = self.originals[number].home
        return self.paths[home] if home < len(self.paths) else ""

    def _note_listings(self) -> None:
        own, chosen, device = self.param, self.chosen_dtype, self._compute_device
        self._seen = own.dtype, own.device
        self.compute_dtype = chosen if chosen is not None and own.dtype.is_floating_point else own.dtype
        self.compute_device = own.device if device is None else device
        self.is_whole = self.group.world_size == 1 and self._seen == (self.compute_dtype, self.compute_device)
        self.versioned: Sequence[torch.Tensor] = [own] if self.shards is None else self.shards.versioned
        if type(own) is FlatParameter:
            own.__class__ = ShardedFlatParameter
        for listing in self.listings:
            kind = listing.originals[0].listed_as
            if kind is not None and not isinstance(listing.param, kind):
                listed = type(listing.param)
                join = both if issubclass(listed, nn.Parameter) else of_dtensors
                listing.param.__class__ = join(kind, listed)  # type: ignore[assignment]
        note_listings(self.listings)
        check_asked_gradients(_refuse_shards)

    def leave_out(self, number: int, layout: ShardLayout) -> None:
        """Gives up an original parameter, the others being laid out so, before the first forward."""
        gone = self.originals.pop(number)
        known_originals.pop(id(gone.param), None)
        self.left_out = (*self.left_out, (gone.home, self.names.pop(number)))
        self.layout, self.unused = layout, Unused(len(self.originals))
        if self.shards is not None:
            self.shards.leave_out(number)
            self.collect()
        self._settle(None)

    def collect(self) -> None:
        """Takes values from registered parameters whose memory was replaced."""
        if self.shards is not None:
            self.param = UnlistedShard.of(self.shards.collected(self.layout.shard_numel), self.shards)
            self._note_listings()

    def take_over(self) -> None:
        """Takes over shards that were moved, cast, or replaced by other objects."""
        if self.shards is not None:
            self.collect()
            return
        module, name = self.places[0]
        param = module._parameters.get(name)
        if param is None or param is self.param:
            return
        if isinstance(self.param, FlatParameter) and not isinstance(param, FlatParameter):
            param = self.param._like_this(param)
        self.param = param
        for place in self.places:
            place.module._parameters[place.name] = param

    @property
    def is_behind(self) -> bool:
        """Says whether modules inside have got other memory, all of them, and nobody computes with what they had."""
        if self.shards is None or self.is_asleep or self.store.state not in (RELEASED, KEPT):
            return False
        return not self.shards.are_views() and self.shards.are_alike()

    @property
    def version(self) -> int:
        """Returns a number that changes with every change of the shard."""
        return sum(p._version for p in self.versioned)

    # ------------------------------------------------------------ the store
    def adopt(self) -> None:
        """Chooses a store whenever the shard's device or dtype changed, and makes original parameters see it."""
        self._settle(self.store)

    def _settle(self, before: Store | None) -> None:
        self.held_at: int | None = None
        self.kept_at: tuple[int, int] | None = None
        self.host: torch.Tensor | None = None
        self._note_listings()
        if "store" in self.__dict__ and self.store.away is not None:  # another store may serve them
            set_versions(*self.store.away)
        self.store = store_for(self, before)
        self.store.users = 0
        target = "meta" if self.param.device.type == "meta" else self.compute_device.type
        empty = torch.empty(0, dtype=self.compute_dtype, device=target)
        for number, original in enumerate(self.originals):
            old = original.param
            with as_tensors():  # asked of parameters whose values can't be read now, too
                fits = old.device.type == target or torch._has_compatible_shallow_copy_type(old, empty)
            if not fits:  # devices between which tensors can't change
                original.replace(empty)
                known_originals[id(old)] = weakref.ref(old), weakref.ref(self), number  # it may be tied
                for place in original.places:
                    place.module.__dict__[place.name] = original.param
        note_originals(self)
        self.store.attach()

    # ------------------------------------------------------------ gathering
    def use(self) -> Store | None:
        """Counts one more unit that needs the values; returns the store if it is to be started, and finished."""
        store = self.store
        if store.state is SUMMONED:
            if current_backward() != NO_BACKWARD:
                raise backward_when_summoned(self)
            return None  # original parameters have their values
        if store.state in FULL:
            store.users += 1
            return None
        if self.shards is not None and not self.shards.are_views():
            self._follow()
        elif self._seen != (self.param.dtype, self.param.device):
            self.adopt()
        self.store.users += 1
        return self.store

    def _follow(self) -> None:
        """Takes other memory that modules inside have got."""
        if self.param.is_meta:
            raise filled_by_parts(self.listings[0])
        self.collect()
        self.adopt()

    def start_gather(self) -> None:
        """Asks for all ranks' shards on behalf of one more unit; call ``store.finish`` before use."""
        if (store := self.use()) is not None:
            store.start()

    def hold(self) -> None:
        """Keeps values of original parameters for a graph that a backward has built, until :meth:`drop`."""
        if self.held_at is None and not self.store.is_whole:
            self.start_gather()
            self.held_at = self.version

    def keep(self) -> None:
        """Keeps values of original parameters, which are gathered or about to be, until :meth:`drop`, or a copy."""
        if self.kept_at is None and not self.trains and not self.store.is_whole:
            if not self.keeps_on_host:
                self.store.users += 1
            self.kept_at = self.version, self.param.data_ptr()

    @property
    def is_outdated(self) -> bool:
        """Says whether values that :meth:`keep` keeps are no longer the shard's, or of parameters trained now."""
        param = self.param
        is_same = self.kept_at == (self.version, param.data_ptr()) and self._seen == (
            param.dtype,
            param.device,
        )
        return self.trains or not is_same or not (self.shards is None or self.shards.are_views())

    def drop(self) -> None:
        """Frees the memory of original parameters, which nobody needs, or which are old.

        Autograd refuses graphs that they were held for.
        """
        self.store.release()
        self.store.copied = None  # somebody may have written to the shard around its version
        self.kept_at = self.host = None
        if self.held_at is not None:
            self.held_at = None
            if self.store.away is not None:
                self.store.away[1][:] = [version + 1 for version in self.store.away[1]]
            else:
                params = tuple(m.param for m in self.originals)
                set_versions(params, tuple(p._version + 1 for p in params))

    # ------------------------------------------------------------ full precision
    @contextmanager
    def summoned(self, writeback: bool | None) -> Iterator[None]:
        """Gives original parameters their values in full precision; with ``writeback`` changes to them are kept.

        With None they are kept where there are any, and refused where the shard has changed, too.

        A graph built inside needs values that are gone afterwards. Autograd finds that by the original parameters'
        versions, which differ inside. They are put back, for graphs from before are as good as ever unless somebody
        changed original parameters.
        """
        self.drop()  # will be stale
        if self.shards is not None and not self.shards.are_views():
            self._follow()
        full = self.store.summon()
        self.store.is_watched = writeback is None
        gradients = [m.param.grad for m in self.originals]  # of the compute dtype
        params = tuple(m.param for m in self.originals)
        versions, version = [p._version for p in params], self.version
        for p in params:
            p.grad = None
        self.store.show(full)
        set_versions(params, tuple(v + 1 for v in versions))
        try:
            yield
        finally:
            written = self.store.written_since([v + 1 for v in versions])
            if writeback or (writeback is None and written and self.version == version):
                self.store.keep(full)
                written = []
            for k, p in enumerate(params):
                versions[k] = versions[k] if p._version == versions[k] + 1 else p._version + 1
            set_versions(params, tuple(versions))
            self.adopt()
            with as_tensors():
                for m, g in zip(self.originals, gradients, strict=True):
                    if g is not None:
                        m.param.grad = g
            if writeback is None and written:
                raise written_original(self, written, shown=True)

    @contextmanager
    def summoned_for_compute(self) -> Iterator[None]:
        """Makes original parameters what a forward computes with, inside of :meth:`summoned`."""
        store, full = self.store, self.store.summoned
        if full is None or self.originals[0].param.dtype == self.compute_dtype:
            yield
            return
        store.collect(full)
        store.show_computed(full)
        versions = [m.param._version for m in self.originals]
        store.written_since(versions)  # what was noted up to now is full precision's
        shown, store.is_watched = store.is_watched, True
        try:
            yield
        finally:
            written, store.is_watched = store.written_since(versions), shown
            store.show(full)
            if written:
                raise written_original(self, written, shown)

    # ------------------------------------------------------------ being copied
    def __getstate__(self) -> StateDict:
        state = self.__dict__.copy()
        for name in ("group", "store", "post_forward_mesh", "ranges", "versioned", "host", "gathers_over"):
            state.pop(name, None)
        if self.shards is not None:
            del state["param"]  # made anew of registered parameters, which are copied one by one
        return state

    @property
    def is_asleep(self) -> bool:
        """Says whether it was copied, and has no group yet."""
        return "group" not in self.__dict__

    def connect(self, group: Group, post_forward_mesh: Group | None) -> None:
        """Comes back to life after copying or unpickling."""
        self.group = group
        self.post_forward_mesh = post_forward_mesh
        self.ranges = UNNAMED
        if self.shards is not None:
            self.shards.set_gradient(None)  # copies of parameters have none; those of DTensors do
        self.collect()
        self._settle(None)


@contextmanager
def exposed(flat: FlatParam, writeback: bool | None) -> Iterator[None]:
    """Lists original parameters under their own names, and no registered ones, inside."""
    # where they are listed: not in units that only borrow them
    listed = [(place, listing.param) for listing in flat.listings for place in listing.places]
    listed = [(place, param) for place, param in listed if place.module._parameters.get(place.name) is param]
    for place, _ in listed:
        unregister(place)
    for original in flat.originals:
        for place in original.places:
            show(place, original.param)
    try:
        yield
    finally:
        others = []  # of another shape
        for original, name in zip(flat.originals, flat.names, strict=True):
            for place in original.places:
                now = place.module._parameters.get(place.name, original.param)
                if now is not None and local_of(now).shape != local_of(original.param).shape:
                    others.append(f"{name!r} has shape {(*now.shape,)}, was {(*original.param.shape,)}")
                elif now is not None and now is not original.param:  # somebody put another parameter in
                    original.assign(local_of(now.data).reshape(-1))
                    if writeback is not False:  # how to read it, as bitsandbytes' quant_state
                        vars(original.param).update(vars(now))
                hide(place, original.param)
        for place, param in listed:
            register(place, param)
        if others:
            raise ConfigurationError(
                f"a parameter was put into a summoned module that does not fit its shard: {'; '.join(others)}. The old "
                "one stays, and what else was changed is kept. Change a module's shapes before it is sharded"
            )
