"""Registered parameters: this rank's shards, as modules list them, and as optimizers and users see them.

Legend: W world size, S numel of a flat parameter's shard, n numel of a part of it.

[Note: registered shards] A flat parameter travels, and modules list what is in it. One that is listed as such has one
registered parameter, its shard [S]. Otherwise each original parameter has one of its own under its name: this rank's
part of it, a view of the shard, in the shape of rows where the layout keeps rows. Its gradient is a view of the shard's
gradient. Such a flat parameter's ``param`` is a shard that no module lists (:class:`UnlistedShard`).

Memory is the truth: before values are gathered, registered parameters whose memory somebody replaced (``p.data = ...``,
``module.to()``) are copied into the shard and become views of it again.

[Note: registries] Parameters that lie in a flat parameter are attributes of their modules, and in no registry: code
that walks ``module._parameters`` (to find shared weights, say) finds what fairscale leaves there. The order in which a
module was written with them is kept beside, for those who list them or put them back. Where DTensors are listed, the
attribute is the original parameter only while that has values, and the DTensor at all other times, as with FSDP2:
``init_weights`` and what loads a checkpoint write to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter, is_
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..backend import Group
from ..errors import LifecycleError
from ..flattening.flat_parameter import FlatParameter
from ..layout import Listed
from ..optimizers.shards import changed_by_steps, listing_of, shard_behind
from ..reduction.shard_gradients import RowlessGradient, ShardGradient, mark_dtensor
from ..torch_seams.dtensors import (
    as_parameter,
    at_offset_0,
    dtensor_of,
    is_dtensor,
    local_of,
    of_dtensors,
    part_here,
)
from ..torch_seams.hooks import check_asked_gradients
from ..torch_seams.tensor_facts import as_plain
from ..types import StateDict
from .extended import ExtendedParameter, no_values
from .originals import OriginalParameter, Place, SplitParameter, as_tensors, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .flat_param import FlatParam

Registered: TypeAlias = "FlatParam | RegisteredShard"
"""Says for what a registered parameter is listed: all of a flat parameter, or one original parameter of it."""

_grad_of, _address_of, _local_of = attrgetter("grad"), torch.Tensor.data_ptr, attrgetter("_local_tensor")
_param_of, _offset_of, _shape_of = attrgetter("param"), attrgetter("offset"), attrgetter("shape")
_hooks_of, _later_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@functools.cache
def watch_asked_gradients() -> None:
    """Refuses backwards that are asked for gradients of shards, from now on."""
    check_asked_gradients(_refuse_shards)


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
    """

    def __init__(
        self,
        flat: FlatParam,
        number: int,
        listed: Listed,
        values: torch.Tensor,
        spec: DTensorSpec | None,
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
        return {**self.__dict__, "spec": None}  # that of the DTensor

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
        cut = [placement.is_shard() for placement in getattr(self.original.param, "placements", ())]
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
                within = original.param._spec if isinstance(original, SplitParameter) else None
                dtensor = part_here(shard, mesh, original.shape, within, original.dim)
                spec, one = dtensor._spec, one._replace(shape=tuple(dtensor._local_tensor.shape))
            self.each.append(RegisteredShard(flat, number, one, shard, spec))
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
        self._split.append(shard.numel() - end)
        self._rowless: list[int] = []  # DTensors of which the last rank has nothing
        for k, r in enumerate(self.each):
            self._parts.append((places.get(r.first, 0), r.shape))
            cut = r.layout
            if (
                mesh is not None
                and not cut.copies
                and cut.shard_numel * (cut.world_size - 1) >= cut.numels[0]
            ):
                self._rowless.append(k)
        self._note_memory(shard)

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
        for r, g in there:
            with as_plain():
                r.part(made).copy_(r.local(g))
        kind = next((type(g) for r, g in there if r.spec is None), torch.Tensor)
        self._show(made, [g is not None for g in now], kind)
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
        own = self._common(there) if len(there) == len(before) and not hooked else None
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

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns the gradient of which those of registered parameters are views, [S]."""
        return self.shards.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.shards.set_gradient(value)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether any registered parameter does."""
        return any(p.requires_grad for p in self.shards.params)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> UnlistedShard:
        """Sets it of all registered parameters."""
        for p in self.shards.params:
            p.requires_grad_(requires_grad)
        return self


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

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """1, whatever the original parameters have; see :data:`dimensions_asked`."""
        return self.dim()

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

    @property
    def _is_sharded(self) -> bool:
        return self._flat.group.world_size > 1

    @property
    def _is_shared(self) -> bool:
        return False

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size([self._flat.layout.numel])

    @property
    def _fp32_shard(self) -> torch.Tensor:
        return self.data

    @property
    def _fp16_shard(self) -> torch.Tensor | None:
        """Returns None: shards are cast on their way into the gathered flat parameter."""
        return None

    @property
    def _full_param_padded(self) -> torch.Tensor:
        """Returns the gathered flat parameter [W * S]; without memory while the unit is not gathered."""
        return self._flat.store.gathered

    @property
    def _saved_grad_shard(self) -> torch.Tensor | None:
        return self.grad

    @property
    def _cpu_grad(self) -> torch.Tensor | None:
        return self.grad if self.device.type == "cpu" else None


ORDER = "_written_parameters"  # an attribute, so that copies and pickles of the module have it


def register(place: Place, param: nn.Parameter) -> None:
    """Registers a parameter of a module under one of the names it was written with, where that was among the others."""
    module, name = place
    registered, is_new = module._parameters, name not in module._parameters
    registered[name] = param
    if is_new and name in _order(module):
        for written in written_names(module):
            if written in registered:
                registered[written] = registered.pop(written)


def unregister(place: Place) -> None:
    """Notes that a module forgets a name; :func:`register` knows where it was."""
    module, name = place
    if name not in _order(module):
        module.__dict__[ORDER] = {written: k for k, written in enumerate(written_names(module))}
    module._parameters.pop(name, None)


def hide(place: Place, param: nn.Parameter) -> None:
    """Leaves the parameter an attribute of its module that is not registered."""
    unregister(place)
    place.module.__dict__[place.name] = param


def take_out(originals: Sequence[OriginalParameter]) -> None:
    """Leaves these attributes of their modules that are not registered."""
    for original in originals:
        for place in original.places:
            module, name = place
            if name not in module.__dict__.get(ORDER, ()):
                hide(place, original.param)
            else:
                module._parameters.pop(name, None)
                module.__dict__[name] = original.param


def show(place: Place, param: nn.Parameter) -> None:
    """Registers the parameter in its module again."""
    place.module.__dict__.pop(place.name, None)
    register(place, param)


def written_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's parameters in order, those that a unit has taken included."""
    order = _order(module)
    return [*order, *(name for name in module._parameters if name not in order)]


def hidden(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters that are attributes of a module, and in no registry."""
    for name in _order(module):
        if name not in module._parameters and isinstance(module.__dict__.get(name), nn.Parameter):
            yield name, module.__dict__[name]


def _order(module: nn.Module) -> dict[str, int]:
    """Gives places of names among those that a module was written with."""
    order: dict[str, int] = module.__dict__.get(ORDER, {})
    return order


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
