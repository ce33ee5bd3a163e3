"""Parameters of one unit as one flat parameter of which each rank keeps a shard.

Legend: W world size, N numel of all original parameters, S shard numel (N / W rounded up).

[Note: original parameters] The parameters of the wrapped module stay what they are: leaf tensors, the same objects,
reached as attributes of their modules. Only their data moves: they are views of one buffer [W * S] whose memory exists
while the unit is gathered (``originals.py``: what they are meanwhile). So autograd sees no reshaping, their gradients
are their own, a weight used in two units stays one weight, and whoever kept a reference to a parameter (an RNN, a hook,
a metric) keeps the right one. What ``parameters()`` lists is the shard, or views of it (``registered.py``).

[Note: memory] Where the values are is the store's (``store/``), of which there are four kinds: tensors own memory that
is taken and released, execution is lazy, one rank has everything, or values come later. What they are at a time is its
state, see ``store.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..backend import Group
from ..flattening.flat_parameter import FlatParameter
from ..layout import ShardLayout
from ..optimizers.shards import note_listings
from ..policy import Compression, ReducePolicy
from ..torch_seams.hooks import NO_BACKWARD, current_backward
from ..tracing.ranges import UNNAMED, UnitRanges
from ..types import StateDict
from .originals import (
    OriginalParameter,
    Place,
    Unused,
    as_tensors,
    backward_when_summoned,
    note_originals,
)
from .registered import (
    Registered,
    RegisteredShards,
    ShardedFlatParameter,
    UnlistedShard,
    class_of,
    filled_by_parts,
    watch_asked_gradients,
)
from .store import FULL, KEPT, RELEASED, SUMMONED, Store, store_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AS_IT_IS, _name_of = ReducePolicy(), attrgetter("name")
_set_versions = torch._C._autograd._unsafe_set_version_counter


class FlatParam:
    """Original parameters of one dtype, sharded evenly as one flat parameter.

    Args:
        originals: in the order in which they lie in it.
        shard: this rank's, [S], in full precision; where it is listed a parameter, as the optimizer sees it.
        places: where that is; none where original parameters are listed one by one.
        mesh: over which these are listed as DTensors, if they are.
        layout: where original parameters and shards lie.
        group: ranks that share it.
        compute_dtype: dtype while gathered; None for the shard's own.
        compute_device: device while gathered; None for the shard's own.
        post_forward_mesh: ranks, this one among them, that can keep the values between them after forward.
        compression: of what is gathered.
        offloaded: the store where the shard is on the host; None for that of the device's shards.
        sends_changes: of what ranks have received before, only what has changed since is gathered.

    Attributes:
        names: path of each in the unit's module.
        compute_dtype: of what is gathered; complex numbers and integers stay what they are.
        compute_device: of the original parameters while gathered.
        is_whole: this rank's shard has all values, as they are computed with.
        shards: what modules list for the original parameters; None where ``param`` is listed.
        listings: what registered parameters are listed for: itself, or its original parameters one by one.
        versioned: tensors whose versions change with every change of the shard.
        lists_dtensors: these are DTensors.
        trains: whether gradients are reduced for it, as far as its unit knows.
        reduce: how, as its unit says.
        label: what it is called in errors.
        paths: of the unit's modules in the root module, as far as they are known.
        ranges: the unit's.
        store: where its values are, and in which state.
        is_borrowed: units of other modules need original parameters, too.
        modules: of the unit, where views of original parameters may be kept (see [Note: kept views] in ``store.py``).
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

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        shard: torch.Tensor,
        places: Sequence[Place],
        mesh: DeviceMesh | None,
        layout: ShardLayout,
        group: Group,
        compute_dtype: torch.dtype | None,
        compute_device: torch.device | None,
        post_forward_mesh: Group | None = None,
        compression: Compression | None = None,
        offloaded: type[Store] | None = None,
        sends_changes: bool = False,
    ) -> None:
        self.originals = list(originals)
        self.names = list(map(_name_of, originals))
        self.places = list(places)
        self.shards: RegisteredShards | None = None
        self.listings: Sequence[Registered] = [self]
        self.trains = self.lists_dtensors = self.keeps_on_host = False
        self.reduce = _AS_IT_IS
        self.group = group
        self.layout = layout
        self.label, self.paths = "", [""]
        self.ranges: UnitRanges = UNNAMED
        self.is_borrowed = False
        self.unused = Unused(len(self.originals))
        self.written: list[int] = []
        self.on_gather: Callable[[torch.Tensor, torch.Tensor], object] | None = None
        self.post_forward_mesh = post_forward_mesh
        self.modules: Sequence[nn.Module] = ()
        self.chosen_dtype = compute_dtype
        self._compute_device = compute_device
        self.compression = compression
        self.offloaded, self.sends_changes = offloaded, sends_changes
        if not places:
            self.shards = RegisteredShards(self, shard, mesh)
            self.listings, self.lists_dtensors = self.shards.each, self.shards.are_dtensors
            shard = UnlistedShard.of(shard, self.shards)
        self.param: nn.Parameter = shard  # type: ignore[assignment]
        self._settle(None)

    # ------------------------------------------------------------ what modules list
    @property
    def flat(self) -> FlatParam:
        """Itself: it is :data:`~.registered.Registered`."""
        return self

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
                listing.param.__class__ = class_of(kind, type(listing.param))  # type: ignore[assignment]
        note_listings(self.listings)
        watch_asked_gradients()

    def collect(self) -> None:
        """Takes values from registered parameters whose memory was replaced."""
        if self.shards is not None:
            self.param = UnlistedShard.of(self.shards.collected(self.layout.shard_numel), self.shards)
            self._note_listings()

    @property
    def is_behind(self) -> bool:
        """Whether modules inside have got other memory, all of them, and nobody computes with what they had."""
        if self.shards is None or self.is_asleep or self.store.state not in (RELEASED, KEPT):
            return False
        return not self.shards.are_views() and self.shards.are_alike()

    @property
    def version(self) -> int:
        """Changes with every change of the shard."""
        return sum(p._version for p in self.versioned)

    # ------------------------------------------------------------ the store
    @property
    def is_summoned(self) -> bool:
        """Inside :meth:`summoned`."""
        return self.store.state is SUMMONED

    def adopt(self) -> None:
        """Chooses a store whenever the shard's device or dtype changed, and makes original parameters see it."""
        self._settle(self.store)

    def _settle(self, before: Store | None) -> None:
        self.held_at: int | None = None
        self.kept_at: tuple[int, int] | None = None
        self.host: torch.Tensor | None = None
        self._note_listings()
        self.store = store_for(self, before)
        self.store.users = 0
        target = "meta" if self.param.device.type == "meta" else self.compute_device.type
        empty = torch.empty(0, dtype=self.compute_dtype, device=target)
        for original in self.originals:
            old = original.param
            with as_tensors():  # asked of parameters whose values can't be read now, too
                fits = old.device.type == target or torch._has_compatible_shallow_copy_type(old, empty)
            if not fits:  # devices between which tensors can't change
                original.replace(empty)
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
        store = self.use()
        if store is not None:
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
        """Whether values that :meth:`keep` keeps are no longer the shard's, or of parameters that are trained now."""
        param = self.param
        is_same = self.kept_at == (self.version, param.data_ptr()) and self._seen == (
            param.dtype,
            param.device,
        )
        return self.trains or not is_same or not (self.shards is None or self.shards.are_views())

    def drop(self) -> None:
        """Nobody needs the original parameters, or they are old: frees their memory.

        Autograd refuses graphs that they were held for.
        """
        self.store.release()
        self.store.copied = None  # somebody may have written to the shard around its version
        self.kept_at = self.host = None
        if self.held_at is not None:
            self.held_at = None
            params = tuple(m.param for m in self.originals)
            _set_versions(params, tuple(p._version + 1 for p in params))

    # ------------------------------------------------------------ full precision
    @contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """Gives original parameters their values in full precision; with ``writeback`` changes to them are kept.

        A graph built inside needs values that are gone afterwards. Autograd finds that by the original parameters'
        versions, which differ inside. They are put back, for graphs from before are as good as ever unless somebody
        changed original parameters.
        """
        self.drop()  # will be stale
        if self.shards is not None and not self.shards.are_views():
            self._follow()
        full = self.store.summon()
        gradients = [m.param.grad for m in self.originals]  # of the compute dtype
        params = tuple(m.param for m in self.originals)
        versions = [p._version for p in params]
        for p in params:
            p.grad = None
        self.store.show(full)
        _set_versions(params, tuple(v + 1 for v in versions))
        try:
            yield
        finally:
            if writeback:
                self.store.keep(full)
            for k, p in enumerate(params):
                versions[k] = versions[k] if p._version == versions[k] + 1 else p._version + 1
            self.adopt()
            _set_versions(params, tuple(versions))
            with as_tensors():
                for m, g in zip(self.originals, gradients, strict=True):
                    if g is not None:
                        m.param.grad = g

    @contextmanager
    def summoned_for_compute(self) -> Iterator[None]:
        """Inside of :meth:`summoned`: original parameters are what a forward computes with."""
        store, full = self.store, self.store.summoned
        if full is None or self.originals[0].param.dtype == self.compute_dtype:
            yield
            return
        store.collect(full)
        store.show_computed(full)
        try:
            yield
        finally:
            store.show(full)

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
        """It was copied, and has no group yet."""
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
