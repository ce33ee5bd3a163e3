"""Parameters of one unit as one flat parameter of which each rank keeps a shard.

Legend: W world size, N numel of all original parameters, S shard numel (N / W rounded up).

[Note: original parameters] The parameters of the wrapped module stay what they are: leaf tensors, the same objects,
reached as attributes of their modules. Only their data moves: they are views of one buffer [W * S] whose memory exists
while the unit is gathered (``originals.py``: what they are meanwhile). So autograd sees no reshaping, their gradients
are their own, a weight used in two units stays one weight, and whoever kept a reference to a parameter (an RNN, a hook,
a metric) keeps the right one. What ``parameters()`` lists is the shard, or views of it.

[Note: memory] Where the values are is the store's (``store.py``), which has kinds: tensors own memory that is taken and
released, execution is lazy, one rank has everything, or values come later. What they are at a time is its state.

[Note: registered shards] A flat parameter travels, and modules list what is in it. One that is listed as such has one
registered parameter, its shard [S]. Otherwise each original parameter has one of its own under its name: this rank's
part of it, a view of the shard, in the shape of rows where the layout keeps rows. Its gradient is a view of the shard's
gradient. Such a flat parameter's ``param`` is a shard that no module lists (:class:`UnlistedShard`).

Memory is the truth: before values are gathered, registered parameters whose memory somebody replaced (``p.data = ...``,
``module.to()``) are copied into the shard and become views of it again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter, is_, lt, or_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..backend import Group
from ..errors import LifecycleError
from ..flattening.wrapper import FlatParameter
from ..layout import Listed, ShardLayout
from ..optimizers.shards import changed_by_steps, listing_of, note_listings, shard_behind
from ..policy import ReducePolicy
from ..reduction.shard_gradients import RowlessGradient, ShardGradient, StandingGradient, mark_dtensor
from ..torch_seams.hooks import NO_BACKWARD, check_asked_gradients, current_backward
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
from ..types import StateDict, Tree
from .originals import (
    OriginalParameter,
    Place,
    as_tensors,
    backward_when_summoned,
    hide,
    known_originals,
    mesh_of,
    note_originals,
    register,
    show,
    unregister,
)
from .own_forms import ExtendedParameter, no_values
from .store import FULL, KEPT, RELEASED, SUMMONED, Mirrored, Store, set_versions, store_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .state import ShardingState

_AS_IT_IS, _name_of = ReducePolicy(), attrgetter("name")

Registered: TypeAlias = "FlatParam | RegisteredShard"
"""Says for what a registered parameter is listed: all of a flat parameter, or one original parameter of it."""

_grad_of, _address_of, _local_of = attrgetter("grad"), torch.Tensor.data_ptr, attrgetter("_local_tensor")
_param_of, _offset_of, _shape_of = attrgetter("param"), attrgetter("offset"), attrgetter("shape")
_hooks_of, _later_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@functools.cache
def class_of(kind: type, listed: type[torch.Tensor]) -> type[torch.Tensor]:
    """Makes the class of what is listed one that has another's methods, too."""
    if not issubclass(listed, nn.Parameter):
        return of_dtensors(kind, listed)
    return type(kind.__name__, (kind, listed), {})


@contextlib.contextmanager
def _refuse_shards(inputs: Sequence[torch.Tensor], accumulate: bool) -> Iterator[None]:
    """Raises LifecycleError where a backward is asked for gradients of shards."""
    for asked in inputs:
        listing = listing_of(asked)
        if listing is not None:
            raise LifecycleError(
                f"rank {listing.group.ranks[listing.group.rank]}: torch.autograd.grad and backward(inputs=...) can't "
                f"give gradients of an FSDP module's parameters() (here of {listing.label or listing.names[0]!r}): "
                "these are shards, which autograd never sees. Call loss.backward() without inputs= and read their .grad"
            )
    yield


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

    def __init__(
        self, flat: FlatParam, number: int, listed: Listed, values: torch.Tensor, spec: DTensorSpec | None
    ) -> None:
        self.flat, self.first = flat, number
        self.original = original = flat.originals[number]
        self.originals, self.places, self.position = [original], original.places, original.position
        self.layout, self.offset, self.shape = listed
        self.numel = numel = math.prod(self.shape)
        self.spec = spec
        part = values[self.offset : self.offset + numel].view(self.shape)
        if isinstance(original, ExtendedParameter):
            part = original.part
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
        """Names it in errors."""
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
        """Whether a rank before this one has the same part."""
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
            if (
                self.are_dtensors
                and not cut.copies
                and cut.shard_numel * (cut.world_size - 1) >= cut.numels[0]
            ):
                self._rowless.append(k)

    def __getstate__(self) -> StateDict:
        """Returns what a copy or a file takes: tensors that registered parameters have are theirs alone."""
        gone = ("params", "_locals", "versioned", "_addresses", "_gradients")
        return {name: value for name, value in self.__dict__.items() if name not in gone}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self.params = list(map(_param_of, self.each))
        self._gradients = None

    def _note_memory(self, shard: torch.Tensor) -> None:
        self.params = list(map(_param_of, self.each))
        self._locals = list(map(_local_of, self.params)) if self.are_dtensors else self.params
        self.versioned = [*self.params, *self._locals, shard] if self.are_dtensors else self.params
        has_memory = not shard.is_meta and not self._are_apart
        self._addresses = list(map(_address_of, self._locals)) if has_memory else []

    # ------------------------------------------------------------ values
    def are_views(self) -> bool:
        """Whether nobody has replaced the memory of a registered parameter."""
        # torch swaps what is in a DTensor
        now = map(_local_of, self.params) if self.are_dtensors else self._locals
        if not self._addresses:
            return all(map(is_, now, self._locals))
        return list(map(_address_of, now)) == self._addresses

    def are_alike(self) -> bool:
        """Whether what modules list now is of one dtype and device: not while some of several modules have moved."""
        now = [module._parameters.get(name) for module, name in (r.places[0] for r in self.each)]
        return len({(p.dtype, p.device) for p in now if p is not None}) == 1

    @torch.no_grad()
    def collected(self, numel: int) -> torch.Tensor:
        """Returns a shard [S] with their values; they become views of it.

        Raises:
            LifecycleError: some of them have got memory, and others are on the meta device.
        """
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
            if isinstance(r.original, ExtendedParameter):
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
        own = self._common(there) if len(there) == len(now) else None
        if own is not None:
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
        self._show(made, [g is not None for g in now], kind)
        for param, one in standing:
            one.stand(param, param.grad)
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
            if not copies and r.is_copy:
                continue
            if r.param.grad is not None and r.numel:
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
        _mark(views, kind)
        for k in self._rowless:
            if (rowless := views[k]) is not None:
                mark_dtensor(rowless, RowlessGradient)
        return views

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
            _mark(before, kind)
        elif there or hooked:
            for p, view in zip(self.params, self._views(gradient, had, kind), strict=True):
                if view is not None:
                    add_gradient(p, view, kind)
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
    if type(param.grad) is torch.Tensor:
        param.grad.__class__ = kind
    else:
        _mark([param.grad], kind)
    for after in (param._post_accumulate_grad_hooks or {}).values() if is_last else ():
        after(param)


def _mark(gradients: Iterable[torch.Tensor | None], kind: type[torch.Tensor]) -> None:
    """Makes plain gradients ones whose other parts are on other ranks."""
    if kind is not torch.Tensor:
        for g in gradients:
            if type(g) is torch.Tensor:
                g.__class__ = kind
            elif g is not None and issubclass(kind, ShardGradient) and kind.in_order:
                mark_dtensor(g, kind)


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
        """1, whatever the original parameters have; see :data:`dimensions_asked`."""
        flat = shard_behind(self)
        if flat is not None:
            dimensions_asked.add(flat)
        return super().dim()

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


class Unused:
    """See above.

    Attributes:
        originals: for each, whether it had none. Where execution is lazy that is data, and all are taken to have had
            one, as they are before the first backward.
        used: there, [S]: true for elements of this rank's shard that have had one; None if all have.
        is_noted: a backward has said so since the last step.
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
        self.is_noted = True
        # none had it, and none before, or it is new: bools are in order, and no call of Python's is made
        self.originals = list(map(lt, had, map(or_, self.originals, are_new)))

    def note_elements(self, used: torch.Tensor | None, is_new: bool) -> None:
        """Returns the same for elements, [S]; None if all have got one."""
        self.is_noted = True
        self.originals = [False] * len(self.originals)
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
        if "store" in self.__dict__ and self.store.away is not None:  # another store may serve them
            set_versions(*self.store.away)
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
            if self.store.away is not None:
                self.store.away[1][:] = [version + 1 for version in self.store.away[1]]
            else:
                params = tuple(m.param for m in self.originals)
                set_versions(params, tuple(p._version + 1 for p in params))

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
        set_versions(params, tuple(v + 1 for v in versions))
        try:
            yield
        finally:
            if writeback:
                self.store.keep(full)
            for k, p in enumerate(params):
                versions[k] = versions[k] if p._version == versions[k] + 1 else p._version + 1
            set_versions(params, tuple(versions))
            self.adopt()
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


@contextmanager
def exposed(flat: FlatParam) -> Iterator[None]:
    """Lists original parameters under their own names, and no registered ones, inside."""
    # where they are listed: not in units that only borrow them
    listed = [
        (listing.param, [p for p in listing.places if p.module._parameters.get(p.name) is listing.param])
        for listing in flat.listings
    ]
    for _, places in listed:
        for place in places:
            unregister(place)
    for original in flat.originals:
        for place in original.places:
            show(place, original.param)
    try:
        yield
    finally:
        for original in flat.originals:
            for place in original.places:
                now = place.module._parameters.get(place.name)
                if now is not None and now is not original.param:  # somebody put another parameter in
                    original.assign(local_of(now.data).reshape(-1))
                hide(place, original.param)
        for param, places in listed:
            for place in places:
                register(place, param)
