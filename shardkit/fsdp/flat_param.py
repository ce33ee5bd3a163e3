"""Parameters of one unit as one vector of which each rank keeps a shard.

Legend: W world size, N numel of all members, S shard numel (N / W rounded up), F flags in one rank's part.

[Note: members] The parameters of the wrapped module stay what they are: leaf tensors, the same objects, reached as
attributes of their modules. Only their data moves: they are views of one buffer [W * S] whose memory exists while the
unit is gathered (``members.py``: what they are meanwhile). So autograd sees no reshaping, their gradients are their
own, a weight used in two units stays one weight, and whoever kept a reference to a parameter (an RNN, a hook, a metric)
keeps the right one. What ``parameters()`` lists is the shard, a parameter of its own.

[Note: memory] Where tensors own memory, the buffer's storage is released and taken again, and views of it (those
that autograd saved for backward among them) come back to life. Where they don't (lazy tensors), members get new values
with each gathering and an empty one afterwards; the compiler frees what nobody refers to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..backend import Group, Work
from ..layout import ShardLayout
from ..torch_seams.hooks import NO_BACKWARD, current_backward
from .first_steps import check_first_steps
from .kept_views import KeptViews, holders_of
from .listed import note_listed
from .members import MemberParameter, ReleasedParameter, as_tensors, note_member
from .refusals import backward_when_summoned

_set_versions = torch._C._autograd._unsafe_set_version_counter


class Place(NamedTuple):
    """Where a parameter is an attribute."""

    module: nn.Module
    name: str


@dataclass
class Member:
    """One of the parameters in a vector, and all places where it is found.

    Attributes:
        kind: its class while it has values: a user's own, or ours.
    """

    param: nn.Parameter
    places: list[Place]
    shape: torch.Size = field(init=False)
    kind: type[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = torch.Size() if is_lazy(self.param) else self.param.shape
        self.kind = MemberParameter if type(self.param) is nn.Parameter else type(self.param)


def part_as_data(vector: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of a vector [W * S], as a copy [S]; which one is data, so that all ranks build one graph."""
    rank = torch.tensor([group.rank]).to(vector.device)
    return vector.view(group.world_size, -1).index_select(0, rank).view(-1)


class FlatParam:
    """Members of one dtype, sharded evenly as one vector.

    Args:
        members: in the order in which they lie in the vector.
        names: path of each in the unit's module.
        holder: where ``param`` is listed.
        layout: where members and shards lie.
        param: this rank's shard [S] in full precision, as the optimizer sees it.
        group: ranks that share the vector.
        compute_dtype: dtype while gathered; None for the shard's own.
        compute_device: device while gathered; None for the shard's own.
        neighbours: ranks, this one among them, that can keep the vector between them after forward.

    Attributes:
        label: what it is called in errors.
        path: the unit's path in the root module, as far as it is known.
        pending: the gathering in flight.
        is_whole: this rank's shard is the whole vector as it is computed with; members are views of it.
        is_full: members have their values, or will have after :meth:`finish_gather`.
        is_summoned: inside :meth:`summoned`.
        is_borrowed: units of other modules need members, too.
        is_locked: members have their values for backward alone.
        modules: of the unit, where views of members may be kept (see ``kept_views.py``).
        memory: identifies what members are views of, where that is given back after use; else 0.
        idle: which members have had no gradient on any rank since the gradient was last cleared.
        written: numbers of members that were written to in the last time that they had values; such writes are lost.
        used: where execution is lazy, the same as data: [S], true for elements that have had one; None if all have.
    """

    def __init__(
        self, members: Sequence[Member], names: Sequence[str], param: nn.Parameter, holder: Place,
        layout: ShardLayout, group: Group,
        compute_dtype: torch.dtype | None, compute_device: torch.device | None, neighbours: Group | None = None,
    ) -> None:  # fmt: skip
        self.members = list(members)
        self.names = list(names)
        self.param = param
        self.holder = holder
        self.group = group
        self.layout = layout
        self.label = self.path = ""
        self.is_full = self.is_summoned = self.is_borrowed = self.is_locked = False
        self.idle = [True] * len(self.members)
        self.used: torch.Tensor | None = None
        self.written: list[int] = []
        self._versions: list[int] = []  # of the members, when they got their values
        self._compute_dtype = compute_dtype
        self._compute_device = compute_device
        self._neighbours = neighbours
        self._between: torch.Tensor | None = None  # this rank's part of what neighbours keep
        self._users = 0
        self._full: torch.Tensor | None = None
        self._summoned: torch.Tensor | None = None  # what members are views of then
        self._kept_views = KeptViews()
        self.modules: Sequence[nn.Module] = ()
        self.pending: Work | None = None
        self._has_storage = group.backend.has_storage
        self.adopt()
        check_first_steps()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the members while gathered; complex numbers and integers stay what they are."""
        chosen, own = self._compute_dtype, self.param.dtype
        return chosen if chosen is not None and own.is_floating_point else own

    @property
    def compute_device(self) -> torch.device:
        """Device of the members while gathered."""
        return self._compute_device or self.param.device

    @property
    def is_listed_flat(self) -> bool:
        """Listed as a vector by the unit, not in place of its one member."""
        return all(place.module is not self.holder.module for place in self.members[0].places)

    @property
    def keeps_shapes(self) -> bool:
        """Members have their shapes while they have no values."""
        return self._has_storage or self._is_deferred

    @property
    def gathered(self) -> torch.Tensor:
        """What members are views of, [W * S]; it may have no memory now."""
        return self.param.data if self._full is None else self._full

    # ------------------------------------------------------------ how members see the vector
    def adopt(self) -> bool:
        """Makes the members views; after construction and whenever the shard's device or dtype changed.

        Returns:
            Whether members had to be replaced by other objects (devices between which tensors can't change).
        """
        self.pending, self._users, self.is_full, self.is_locked = None, 0, False, False
        self.memory = 0
        self._seen = (self.param.dtype, self.param.device)
        note_listed(self.param, self)
        p = self.param
        self.is_whole = (
            self.group.world_size == 1 and p.dtype == self.compute_dtype and p.device == self.compute_device
        )
        self._channel = self.group.channel("parameters")
        replaced = self._make_members()
        # Values come with to_empty(); until then nothing is gathered. (A backend that counts serves meta tensors.)
        self._is_deferred = p.is_meta and self.group.backend.device_type != "meta"
        if self._is_deferred:
            self._full = torch.empty(self.layout.numel, dtype=self.compute_dtype, device="meta")
            self._show(self._full)
            self._conceal()
        elif self.is_whole:
            self._full = None
            self._show_shard()
        elif self._has_storage:
            full = self._buffer()
            if full is self._full:
                self._show(full)
                self.memory = full.untyped_storage()._cdata
            else:
                self._look_at(full)
            self._release_storage(full)
        else:
            self._full = None
            # one for good: each new one would be computed in each step
            self._nothing = torch.empty(0, dtype=self.compute_dtype).to(self.compute_device)
            self._hide()
        return replaced

    def _look_at(self, full: torch.Tensor) -> None:
        """Members, and this rank's part, are views of this memory from now on."""
        self._full, self._own = full, self._part(full)
        self.memory = full.untyped_storage()._cdata
        self._show(full)
        self._kept_views = KeptViews()

    def _buffer(self) -> torch.Tensor:
        """Memory [W * S] for gathering; the same one if it fits, for views of it may be saved for backward."""
        dtype, device, old = self.compute_dtype, self.compute_device, self._full
        if old is not None and old.dtype == dtype and old.device == device:
            self.group.backend.take_storage(old)
            return old
        return torch.empty(self.layout.padded_numel, dtype=dtype, device=device)

    def _make_members(self) -> bool:
        target = "meta" if self.param.device.type == "meta" else self.compute_device.type
        replaced = False
        for index, member in enumerate(self.members):
            old = member.param
            empty = torch.empty(0, dtype=self.compute_dtype, device=target)
            with as_tensors():  # asked of parameters whose values can't be read now, too
                fits = old.device.type == target or torch._has_compatible_shallow_copy_type(old, empty)
            if not fits:
                member.param = nn.Parameter(empty, requires_grad=old.requires_grad)
                for place in member.places:
                    place.module.__dict__[place.name] = member.param
                replaced = True
            note_member(member.param, self, index)
        self._reveal()
        return replaced

    def _part(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector [W * S], [S]."""
        size = self.layout.shard_numel
        return vector[self.group.rank * size : (self.group.rank + 1) * size]

    def _show(self, vector: torch.Tensor) -> None:
        """Members become views of a vector [N or more]."""
        sizes = [*self.layout.numels, vector.numel() - self.layout.numel]
        for member, piece in zip(self.members, torch.split_with_sizes(vector, sizes), strict=False):
            # a view less: where execution is lazy, this runs in each step
            member.param.data = piece if len(member.shape) == 1 else piece.view(member.shape)

    def _show_shard(self) -> None:
        flat = self.param.data.reshape(-1)
        self._show(flat)
        self._pointer = flat.data_ptr() if self._has_storage else 0

    def _hide(self) -> None:
        for member in self.members:
            member.param.__class__ = member.kind  # a released one can't be changed
            member.param.data = self._nothing
        self._conceal()

    def _reveal(self) -> None:
        """Members are parameters like any other."""
        for member in self.members:
            member.param.__class__ = member.kind
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """How often each member was written to; inference tensors don't count."""
        try:
            return [member.param._version for member in self.members]
        except RuntimeError:
            return []

    def _note_writes(self) -> None:
        """Members had their values until now, if they had any: a gather that nobody waited for gives none."""
        before, now = self._versions, self._versions_now() if self._versions else []
        self.written = [k for k, v in enumerate(now) if v != before[k]] if now != before else []

    def _conceal(self) -> None:
        """Members, and views of them that a module keeps, have no values from now on; see ``members.py``."""
        if self.memory:
            kept, state = self._kept_views, (torch.is_grad_enabled(), current_backward() != NO_BACKWARD)
            now = holders_of(self.memory)
            if kept.found or now > kept.familiar.get(state, 0):
                kept.conceal(self)
            else:
                kept.familiar[state] = now
        for member in self.members:
            member.param.__class__ = ReleasedParameter
        self._versions = []

    def _release_storage(self, full: torch.Tensor) -> None:
        if (
            not full.untyped_storage().resizable()
        ):  # a member was given to numpy or the like, which keeps its memory
            full = torch.empty_like(full)
            self._look_at(full)
        self._conceal()
        self.group.backend.release_storage(full)

    # ------------------------------------------------------------ gathering
    def start_gather(self, after: Sequence[torch.Tensor] = ()) -> None:
        """Asks for all ranks' shards on behalf of one more unit; call :meth:`finish_gather` before use.

        Args:
            after: where execution is lazy: gathers once these are computed (see ``lazy.py``).
        """
        if self.is_summoned:
            if current_backward() != NO_BACKWARD:
                raise backward_when_summoned(self)
            return  # members have their values
        self._users += 1
        if self.is_full:
            return
        if self._seen != (self.param.dtype, self.param.device):
            self.adopt()
            self._users = 1
        self.is_full = True
        shard = self.param.data
        if self._is_deferred:
            return
        if self.is_whole:
            if not self._has_storage or shard.data_ptr() != self._pointer:
                self._show_shard()  # somebody put another tensor in
        elif self._has_storage and self._full is not None:
            self.group.backend.take_storage(self._full)
            if self._between is not None and self._neighbours is not None:
                between, self._between = self._between, None
                self.pending = self._neighbours.channel("parameters").all_gather_into(
                    self._full, between, async_op=True, label=self.label
                )
                return
            self._own.copy_(shard.view(-1))  # casts, and comes from the host
            if self.group.world_size > 1:
                self.pending = self._channel.all_gather_into(
                    self._full, self._own, async_op=True, label=self.label
                )
            else:
                self._reveal()
                if self._kept_views.found:
                    self._kept_views.reveal()
        else:
            shard = shard.view(-1).clone()  # a value of its own: tying changes it
            self.group.backend.tie([shard, *after])
            shard = shard.to(device=self.compute_device, dtype=self.compute_dtype)
            self._full = shard.new_empty(self.layout.padded_numel)
            self.pending = self._channel.all_gather_into(self._full, shard, async_op=True, label=self.label)

    def finish_gather(self) -> None:
        """From now on members have their values."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.wait()
            self._reveal()
            if not self._has_storage and self._full is not None:
                self._show(self._full)
            elif self._kept_views.found:
                self._kept_views.reveal()

    def release(self, until_backward: bool = False) -> None:
        """One unit no longer needs the members; the last one frees their memory.

        With ``until_backward``, neighbours keep the vector between them, if there are any.
        """
        self._users -= 1
        if self._users <= 0:
            if until_backward and self._neighbours is not None and self._full is not None and self.is_full:
                self.finish_gather()
                size = self._full.numel() // self._neighbours.world_size
                at = self._neighbours.rank * size
                self._between = self._full[at : at + size].clone()
            self.drop()

    def lock(self) -> None:
        """Forward is through, and members stay gathered for backward: nobody else may read or write them.

        What is read would be old once the optimizer has changed the shard; what is written would be forgotten.
        """
        if self.is_full and not self.is_whole and not self._is_deferred:
            self.is_locked = True
            self._note_writes()
            self._conceal()

    def unlock(self) -> None:
        """Backward needs them, or another forward."""
        self.is_locked = False
        if self.is_full:
            self._reveal()
            if self.memory:
                self._kept_views.reveal()

    def forget_between(self) -> None:
        """The shards may have changed: what neighbours keep is old."""
        self._between = None

    def drop(self) -> None:
        """Nobody needs the members: frees their memory."""
        self._users = 0
        if not self.is_full:
            return
        if self.pending is not None:
            self.finish_gather()  # its memory is in use until it is through
        was_locked, self.is_full, self.is_locked = self.is_locked, False, False
        if self.is_whole or self._is_deferred:
            return
        if not was_locked:
            self._note_writes()
        if not self._has_storage:
            self._full = None
            self._hide()
        elif self._full is not None:
            self._release_storage(self._full)

    @property
    def has_idle(self) -> bool:
        """Whether some members had no gradient, or may have had none."""
        return self.used is not None or True in self.idle

    def nothing_used(self) -> None:
        """The gradient is new: no member has had one yet."""
        self.idle = [True] * len(self.members)
        if not self._has_storage:
            self.used = torch.zeros(self.layout.shard_numel, dtype=torch.bool).to(self.compute_device)

    # ------------------------------------------------------------ full precision
    @torch.no_grad()
    def gather_full_precision(self) -> torch.Tensor:
        """The whole vector in the shard's dtype, [W * S], on the compute device (collective)."""
        shard = self.param.data.reshape(-1).to(self.compute_device)
        if self.group.world_size == 1 or shard.is_meta:
            return shard.new_empty(self.layout.padded_numel) if shard.is_meta else shard.clone()
        full = shard.new_empty(self.layout.padded_numel)
        self._channel.all_gather_into(full, shard, label=f"{self.label} in full precision")
        return full

    @contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """Members hold their values in full precision; with ``writeback`` changes to them are kept.

        A graph built inside needs values that are gone afterwards. Autograd finds that by the members' versions, which
        differ inside. They are put back, for graphs from before are as good as ever unless somebody changed members.
        """
        self.drop()  # will be stale
        self.is_summoned = True
        full = self.gather_full_precision()
        self._reveal()
        self._summoned = full
        gradients = [m.param.grad for m in self.members]  # of the compute dtype
        params = tuple(m.param for m in self.members)
        versions = [p._version for p in params]
        for p in params:
            p.grad = None
        self._show(full)
        _set_versions(params, tuple(v + 1 for v in versions))
        try:
            yield
        finally:
            self.is_summoned, self._summoned = False, None
            if writeback:
                self._keep(full)
            for k, p in enumerate(params):
                versions[k] = versions[k] if p._version == versions[k] + 1 else p._version + 1
            self.adopt()
            _set_versions(params, tuple(versions))
            for m, g in zip(self.members, gradients, strict=True):
                if g is not None:
                    m.param.grad = g

    @contextmanager
    def summoned_for_compute(self) -> Iterator[None]:
        """Inside of :meth:`summoned`: members are what a forward computes with."""
        full = self._summoned
        if full is None or self.members[0].param.dtype == self.compute_dtype:
            yield
            return
        self._collect(full)
        self._show(full.to(self.compute_dtype))
        try:
            yield
        finally:
            self._show(full)

    @torch.no_grad()
    def _keep(self, full: torch.Tensor) -> None:
        """Takes this rank's part from members, which are views of ``full`` unless somebody replaced them."""
        self._collect(full)
        part = full
        if self.group.world_size > 1:
            part = self._part(full) if self._has_storage else part_as_data(full, self.group)
        self.param.data.view(-1).copy_(part)

    @torch.no_grad()
    def _collect(self, full: torch.Tensor) -> None:
        for member, start in zip(self.members, self.layout.offsets(), strict=True):
            data = member.param.data
            mine = full[start : start + member.shape.numel()]
            if not self._has_storage or data.data_ptr() != mine.data_ptr():
                mine.copy_(data.reshape(-1))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("group", "_full", "_own", "_nothing", "pending", "_channel", "_neighbours", "_between"):
            state.pop(name, None)
        state["_kept_views"] = KeptViews()
        return state

    def connect(self, group: Group, neighbours: Group | None) -> None:
        """Comes back to life after copying or unpickling."""
        self.group = group
        self._neighbours, self._between, self._full = neighbours, None, None
        self._has_storage = group.backend.has_storage
        self.adopt()
