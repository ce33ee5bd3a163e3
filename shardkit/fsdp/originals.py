"""Parameters of a unit as the rest of a program meets them: with values, or released.

[Note: released] While a unit is not gathered, its original parameters have a shape and no memory. Reading one would end
the process, or show what lies there now; writing one would be forgotten. So they change their class with their memory.
A released one answers what it is (its shape, its gradient), and raises for all that needs values. Inside forward
and backward they are parameters like any other, and operations on them cost nothing more. Functions that would read
weights past the modules that hold them (the fast path of ``nn.TransformerEncoderLayer``) look for tensors that
watch what is done with them, and take the path through the modules then.

[Note: registries] Parameters that lie in a flat parameter are attributes of their modules, and in no registry: code
that walks ``module._parameters`` (to find shared weights, say) finds what fairscale leaves there. The order in which a
module was written with them is kept beside, for those who list them or put them back. Where DTensors are listed, the
attribute is the original parameter only while that has values, and the DTensor at all other times, as with FSDP2:
``init_weights`` and what loads a checkpoint write to it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import resolve_name
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigurationError, LifecycleError
from ..torch_seams.hooks import NO_BACKWARD, callers, current_backward, of_given_back
from ..torch_seams.tensors import (
    ALIKE,
    FACTS,
    SHAPE,
    Annotation,
    WholeMesh,
    as_parameter,
    is_dtensor,
    laid_out,
    like_dtensor,
    name_of,
    without_data,
)
from ..types import AnyCallable, Args, Kwargs, Memo, StateDict, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .flat_param import FlatParam, Store

# A context in which released original parameters are taken for what they are, tensors, and nothing is called for them.
as_tensors = torch._C.DisableTorchFunctionSubclass


_param_of = attrgetter("param")
_DATA: Any = torch.Tensor.data  # how torch gets and sets it
get_data, set_data = _DATA.__get__, _DATA.__set__  # torch.compile can't trace these
_TRAINS: Any = torch.Tensor.requires_grad
_GRADIENT = frozenset({"get grad", "get _grad", "set grad", "set _grad", "delete grad"})


class GatheredParameter(nn.Parameter):
    """A parameter whose values are a part of a gathered flat parameter. A copy of it is a parameter of its own."""

    _has_full_param = True  # as torch_xla's FSDP says it

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Returns its values without a graph; what is written to them has a version of its own, which is looked at."""
        return _noted(self, super().detach() if torch.compiler.is_compiling() else get_data(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if (owner := owner_of(self)) is not None:
            owner.flat.store.note_data(owner.number, None)
        set_data(self, values)

    def detach(self) -> torch.Tensor:
        """Returns the same, which a program may keep, too."""
        return _noted(self, super().detach())

    def requires_grad_(self, requires_grad: bool = True) -> GatheredParameter:
        """Freezes or unfreezes it, and what modules list of it alone: what is said of that next is newer."""
        _TRAINS.__set__(self, requires_grad)
        if (owner := owner_of(self)) is not None:
            for listing in owner.flat.listings[owner.number : owner.number + 1]:
                if listing.is_told:
                    listing.param.requires_grad = requires_grad
        return self

    requires_grad: Any = property(_TRAINS.__get__, requires_grad_)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: Memo) -> nn.Parameter:
        if id(self) not in memo:
            make, (*facts, attributes) = self.__reduce_ex__(2)
            memo[id(self)] = make(*facts, {})
            memo[id(self)].__dict__.update(copy.deepcopy(attributes, memo))  # of the user's class
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Tree:
        return _with_attributes, (nn.Parameter(self.data.clone(), self.requires_grad), self.__dict__)


def _noted(param: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and (owner := owner_of(param)) is not None:  # graphs give others
        owner.flat.store.note_data(owner.number, data)
    return data


class ViewOfShard(GatheredParameter):
    """A parameter of which this rank's shard has all: its values are true at any time, its gradient is the shard's."""

    data = _DATA

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_tensors():
            if name_of(func) in _GRADIENT:
                _refuse_gradient(args[0])
            return func(*args, **(kwargs or {}))


class ReleasedParameter(GatheredParameter):
    """A parameter whose values lie on all ranks, a part on each: it has a shape, and raises if it is used."""

    _has_full_param = False
    data = _DATA

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        what = name_of(func)
        with as_tensors():
            if what in FACTS or what in SHAPE or what in ALIKE:
                param = args[0] if args else None
                if what in FACTS or not isinstance(param, ReleasedParameter):
                    if what in _GRADIENT and isinstance(param, ReleasedParameter):
                        _refuse_gradient(param)
                    return func(*args, **kwargs)
                return func(_of_full_shape(param, what), *args[1:], **kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if all(t.is_meta for t in tensors):
                return func(*args, **kwargs)  # nobody has values here
            param = next(t for t in tensors if isinstance(t, ReleasedParameter | ReleasedView))
            if what in ("__repr__", "__format__"):
                return _described(param)
            if isinstance(func, torch._ops.OpOverload) and current_backward() != NO_BACKWARD:
                # an operation of autograd's, which a dispatch mode has made known to this class
                owner = owner_of(param)
                if owner is not None and owner.flat.store.state.name == "LOCKED":
                    return func(*args, **kwargs)
            raise LifecycleError(refusal_of(param, resolve_name(func) or what))

    def __deepcopy__(self, memo: Memo) -> nn.Parameter:
        owner = owner_of(self)
        if owner is not None and id(owner.flat) not in memo.get(COPIED, ()):
            raise LifecycleError(refusal_of(self, "a copy"))
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Tree:
        return _without_owner, (self.dtype, self.requires_grad, _name(self), self.__dict__)


class ReleasedView(torch.Tensor):
    """A view of a released parameter that a program kept; see [Note: kept views]."""

    __torch_function__ = ReleasedParameter.__torch_function__


class Place(NamedTuple):
    """Tells where a parameter is an attribute."""

    module: nn.Module
    name: str


class OriginalParameter:
    """One of the original parameters in a flat parameter.

    Attributes:
        places: where it is found.
        shape: of all of it that lies in the flat parameter.
        kind: its class while it has values: a user's own, torch's, or ours.
        released: its class while it has none.
        of_shard: its class between uses where this rank's shard has all of it.
        beside: what it is beside values that lie in a shard, and data divides alone; for errors.
        store: of a kind of its own, where it has one.
        is_apart: its values are in no shard.
        part: this rank's rows of one that is; all of them until they are cut.
        listed_as: whose methods what modules list of it has, too.
        within: how tensor parallelism has cut it, along the dimensions of its mesh that are not for data, if it has.
        mesh: of these dimensions.
        home: number of the module that its name is of, where several modules are one unit.
        is_away: it was tied, and untied where its name is, so that other units alone have it.
        name: path in that module, the first where it has several.
        position: among the parameters of that module.
        dim: along which it is cut.
        keeps_dtype: it is computed with in its own, whatever the unit's is.
    """

    beside = ""
    store: type[Store] | None = None
    is_apart = False
    listed_as: type | None = None
    within: DTensorSpec | None = None
    mesh: DeviceMesh | None = None
    is_lazy = is_away = keeps_dtype = False
    dim = 0

    released: type[ReleasedParameter] = ReleasedParameter
    of_shard: type[ViewOfShard] = ViewOfShard

    kind: Any
    part: Tree
    name: str
    position: int
    values = property(attrgetter("param.data"), doc="Returns those that lie in the flat parameter.")

    def __init__(self, param: nn.Parameter, place: Place, home: int = 0) -> None:
        self.param, self.places, self.home = param, [place], home
        self.kind = GatheredParameter if type(param) is nn.Parameter else type(param)
        self.is_lazy = self.kind is not GatheredParameter and is_lazy(param)
        self.shape = torch.Size() if self.is_lazy else param.shape

    @property
    def written(self) -> torch.Size:
        """Returns its shape in the module; what lies in the flat parameter may have another."""
        return self.shape

    @property
    def rows(self) -> torch.Size:
        """Returns its shape with the dimension in front that it is cut along."""
        return torch.Size(
            (*self.shape[self.dim : self.dim + 1], *self.shape[: self.dim], *self.shape[self.dim + 1 :])
        )

    def assign(self, values: torch.Tensor) -> None:
        """Makes these its values from now on, [numel]: a view."""
        # a view less: where execution is lazy, this runs in each step
        set_data(self.param, values if len(self.shape) == 1 else values.view(self.shape))

    def replace(self, empty: torch.Tensor) -> None:
        """Makes it another object, of the dtype and device of this one."""
        self.param = nn.Parameter(empty.clone(), requires_grad=self.param.requires_grad)

    def __getstate__(self) -> StateDict:
        refuse_split([self], "a copy or a pickle", "Save state_dict(), and load it into another model")
        return self.__dict__


class SplitParameter(OriginalParameter):
    """One that tensor parallelism has cut: a DTensor, whose local tensor lies in the flat parameter."""

    beside = "is cut over further ranks by tensor parallelism"
    param: Any

    def __init__(self, param: DTensor, place: Place, home: int = 0, whole: WholeMesh | None = None) -> None:
        self.param, self.places, self.home = param, [place], home
        self.shape = param._local_tensor.shape
        names = param.device_mesh.mesh_dim_names or () if whole is not None else ()
        # dimensions of its mesh that are for data
        self._data = [dim for dim, name in enumerate(names) if whole is not None and name in whole.data]
        self.within = without_data(param, self._data)
        self.mesh = None if self.within is None else self.within.mesh
        self.kind: type[torch.Tensor] = type(param)
        self.released, self.of_shard = (without_values(k, param) for k in (ReleasedParameter, ViewOfShard))

    @property
    def values(self) -> torch.Tensor:
        return self.param._local_tensor.detach()

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        with as_tensors():
            # without the version of what is gathered, which a gather for backward changes: a program may have taken the
            # local tensor (to_local) and saved views of it
            made = like_dtensor(values.view(self.shape).data, self.param)
            self.param.data = made
        self.param._local_tensor, self.param._spec = made._local_tensor, made._spec

    def replace(self, empty: torch.Tensor) -> None:
        made = like_dtensor(empty.new_empty(self.shape), self.param)
        self.param = as_parameter(made, self.param.requires_grad)

    @torch.no_grad()
    def local_gradient(self, gradient: DTensor) -> torch.Tensor:
        """Takes what of a gradient belongs to values here, with the sums that tensor parallelism owes (collective)."""
        # over data they are summed with all others
        wanted = [
            gradient.placements[dim] if dim in self._data else placement
            for dim, placement in enumerate(self.param.placements)
        ]
        if list(gradient.placements) != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local()


class AnnotatedParameter(SplitParameter):
    """One that tensor parallelism has cut, and that modules compute with as a plain tensor; see :class:`WholeMesh`."""

    within: DTensorSpec

    def __init__(self, param: Tree, place: Place, home: int, noted: Annotation) -> None:
        OriginalParameter.__init__(self, param, place, home)
        (self.within, self._owed), self.mesh = noted, noted.within.mesh

    values = OriginalParameter.values
    assign = OriginalParameter.assign
    replace = OriginalParameter.replace

    @torch.no_grad()
    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._owed == self.within.placements:
            return gradient
        owed = laid_out(gradient, self.within.mesh, self._owed, self.within.shape)
        return owed.redistribute(placements=self.within.placements).to_local()


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
    return module.__dict__.get(ORDER, {})  # type: ignore[no-any-return]


def without_values(kind: type[torch.Tensor], tensor: torch.Tensor) -> Tree:
    """Returns the class of a tensor that becomes one of these; of one that wraps others a class that is both."""
    is_wrapper = is_dtensor(tensor) or is_traceable_wrapper_subclass(tensor)
    return both(kind, type(tensor)) if is_wrapper else kind


@functools.cache
def both(kind: type, other: type[torch.Tensor]) -> type[torch.Tensor]:
    """Makes the class of tensors that are of two."""
    return type(kind.__name__, (kind, other), {})


def mesh_of(originals: Sequence[OriginalParameter]) -> DeviceMesh | None:
    """Returns the mesh over which tensor parallelism has cut some of these; None where there are none."""
    for original in originals:  # asked for every unit: without a generator, whose steps are calls
        if original.mesh is not None:
            return original.mesh
    return None


def refuse_split(originals: Sequence[OriginalParameter], what: str, instead: str) -> None:
    """Raises ConfigurationError if any of these is more than values that data divides."""
    for original in originals:
        if original.beside:
            raise ConfigurationError(
                f"{what} is for plain parameters, divided over the ranks of data alone, and one of this model's, a "
                f"{type(original.param).__name__}, {original.beside}. {instead}"
            )


def refuse_meta(flat: FlatParam) -> None:
    """Raises ConfigurationError if these have no values yet."""
    if flat.param.is_meta:
        names = [f"{flat.path_of(k)}.{name}".lstrip(".") for k, name in enumerate(flat.names)]
        raise ConfigurationError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {names}. Call to_empty(device=...) and initialize them first"
        )


class Owner(NamedTuple):
    """The flat parameter that holds an original parameter's values, and which of those in it this is."""

    flat: FlatParam
    number: int


# Of original parameters, by id. Neither these nor flat parameters, which hold them, are kept alive. What is noted ends
# with the flat parameter.
known_originals: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[FlatParam], int]] = {}
# owners of views of original parameters that a program keeps
kept_views: WeakIdKeyDictionary = WeakIdKeyDictionary()
_names_of_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
COPIED: Any = "flat parameters that are being copied"  # beside the ids in the memo of a deepcopy


def owner_of(param: torch.Tensor) -> Owner | None:
    """Returns where an original parameter lies; None for other parameters."""
    found = known_originals.get(id(param))
    flat = None if found is None or found[0]() is not param else found[1]()
    return None if found is None or flat is None else Owner(flat, found[2])


def managing(param: nn.Parameter) -> FlatParam | None:
    """Returns the flat parameter that manages an original parameter, None for other parameters."""
    found = known_originals.get(id(param))
    return None if found is None or found[0]() is not param else found[1]()


def note_originals(flat: FlatParam) -> None:
    """Makes these parameters known as the original parameters of a flat parameter."""
    keys = list(map(id, map(_param_of, flat.originals)))

    def forget(gone: weakref.ref[FlatParam]) -> None:
        for key in keys:
            if key in known_originals and known_originals[key][1] is gone:
                del known_originals[key]

    owner = weakref.ref(flat, forget)
    for number, original in enumerate(flat.originals):
        known_originals[keys[number]] = weakref.ref(original.param), owner, number


def name_of_original(param: nn.Parameter) -> str | None:
    """Returns the full name of an original parameter, as far as it is known; None for other parameters."""
    return _name(param) if owner_of(param) is not None else None


def _begin_error(version: int) -> str:
    with as_tensors():
        for param in [p for ref, *_ in [*known_originals.values()] if (p := ref()) is not None]:
            if param._version == version and (owner := owner_of(param)) is not None:
                group = owner.flat.group
                return f"rank {group.ranks[group.rank]}: backward came to parameter {_name_in(owner)!r}, which is"
    return ""


of_given_back.append(_begin_error)


def _of_full_shape(param: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the parameter, or where it has lost its shape too (lazy execution) one that is like it."""
    owner = owner_of(param)
    if owner is None or owner.flat.store.keeps_shapes:
        return param
    shape = owner.flat.originals[owner.number].shape
    return torch.empty(shape, dtype=param.dtype, device=param.device if what in ALIKE else "meta")


def _name(param: torch.Tensor) -> str:
    owner = owner_of(param)
    return str(_names_of_copies.get(param, "of an FSDP module")) if owner is None else _name_in(owner)


def _name_in(owner: Owner) -> str:
    name, path = owner.flat.names[owner.number], owner.flat.path_of(owner.number)
    return f"{path}.{name}" if path else name


def _described(param: ReleasedParameter | ReleasedView) -> str:
    shape = tuple(_of_full_shape(param, "shape").shape)
    return f"<parameter {_name(param)!r} of shape {shape}, {param.dtype}, sharded: it has no values here now>"


def refusal_of(param: ReleasedParameter | ReleasedView, what: str) -> str:
    of_view = kept_views.get(param)
    flat = None if of_view is None else of_view[0]()
    if flat is not None:
        group, name = flat.group, _name_in(Owner(flat, of_view[1]))
        return (
            f"rank {group.ranks[group.rank]}: {what} needs the values of a view of parameter {name!r} that was kept "
            f"from a forward: the parameter is sharded over {group.world_size} ranks and not gathered now, and the "
            "view has no memory then. Keep a clone() of it, or read it inside of the forward of the FSDP module that "
            "holds the parameter"
        )
    owner, name = owner_of(param), _name(param)
    if owner is None:
        return (
            f"{what} needs the values of parameter {name!r}, but this is a copy of it without the FSDP module that "
            "holds them; copy or save the FSDP module, or copy inside of its summon_full_params()"
        )
    group = owner.flat.group
    where = f"rank {group.ranks[group.rank]}: {what} needs the values of parameter {name!r}, "
    if param.is_meta:
        return where + "which is on the meta device and has none yet; call the FSDP module's to_empty() first"
    return where + (
        f"which is sharded over {group.world_size} ranks and not gathered now. Parameters have values inside of the "
        "forward of the FSDP module that holds them: call that module, not a method of what it wraps. Elsewhere use "
        "`with module.summon_full_params():` (of a module that fully_shard has sharded: "
        "`with shardkit.sharding_of(module).summon_full_params():`). A module that reads weights of other modules has "
        "to be wrapped together with them"
    )


def _refuse_gradient(param: torch.Tensor) -> None:
    """Raises where the parameter's gradient was reduced: what is read or set here would not be it."""
    owner = owner_of(param)
    if (
        owner is None
        or param.grad is not None
        or owner.flat.param.grad is None
        or owner.flat.unused.originals[owner.number]
    ):
        return
    group = owner.flat.group
    raise LifecycleError(
        f"rank {group.ranks[group.rank]}: the gradient of parameter {_name(param)!r} was reduced, and is a part of the "
        f"gradients of shards ({group.world_size} ranks). Clip, scale and clear gradients of the FSDP module's "
        "parameters(), not of what it wraps"
    )


def _with_attributes(param: nn.Parameter, attributes: StateDict) -> nn.Parameter:
    param.__dict__.update(attributes)
    return param


def _without_owner(
    dtype: torch.dtype, requires_grad: bool, name: str, attributes: StateDict | None = None
) -> nn.Parameter:
    """Returns a copy; the copy of its flat parameter, if there is one, will give it values."""
    param = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=requires_grad)
    _names_of_copies[param] = name
    param.__dict__.update(attributes or {})
    param.__class__ = ReleasedParameter
    return param


# Functions of peft's that look for names of modules among the keys of a state dict: the wrapper's names are longer.
_BY_NAMES_OF_MODULES = {
    "get_peft_model_state_dict": "get_peft_model_state_dict(model.module, state_dict=model.state_dict())",
    "set_peft_model_state_dict": (
        "it inside of `with model.summon_full_params():` for the wrapped module, "
        "set_peft_model_state_dict(model.module, state)"
    ),
}


FUNCTIONAL = (
    "Change parameters inside of summon_full_params(), and call functional_call there on a module that has no FSDP "
    "modules below; or call it on a module that is not wrapped and has loaded this one's state_dict()"
)


def put_into_wrapper(name: str) -> LifecycleError:
    """Returns the error where a parameter or buffer gets the name of what the wrapped module has."""
    return LifecycleError(
        f"{name!r} is a parameter or buffer of the module that FSDP wraps and can't be replaced through the wrapper "
        "(functional_call does this). " + FUNCTIONAL
    )


def backward_when_summoned(flat: FlatParam) -> LifecycleError:
    """Returns the error where backward needs what a forward inside of ``summon_full_params`` computed with."""
    return LifecycleError(
        f"rank {flat.group.rank}: backward through {flat.label} inside of summon_full_params, or "
        "through a forward that was run there, is not possible; leave the context first"
    )


def written_original(flat: FlatParam, written: Sequence[int] = (), shown: bool = False) -> LifecycleError:
    """Returns the error, raised once, where memory of gathered parameters (``shown`` by unshard()) was written to."""
    first, flat.written = [*written, *flat.written][0], []
    when = "while it was gathered (in forward, or before the backward that followed)"
    if shown:
        when = (
            "after unshard() of a unit that computes in another dtype, or whose shards were written to, too"
        )
    return LifecycleError(
        f"rank {flat.group.rank}: parameter {name_of_original(flat.originals[first].param)!r} was written to {when}. "
        "It is a copy of what the shards hold, and the change is lost. Write inside of summon_full_params(), between "
        "steps; a value that changes in forward can be a buffer"
    )


def changed_since_forward(flat: FlatParam) -> LifecycleError:
    """Returns the error where backward reaches a unit whose shard was written to after forward."""
    return LifecycleError(
        f"rank {flat.group.rank}: backward through a forward of before the last change of "
        f"{flat.label} (by optimizer.step(), say): it would compute with the new values. Call "
        "backward before the optimizer's step, or forward again after it"
    )


def copy_when_summoned(rank: int) -> LifecycleError:
    """Returns the error where an FSDP module is copied or pickled while its parameters are full."""
    return LifecycleError(
        f"rank {rank}: copying or pickling an FSDP module inside of summon_full_params, or after unshard(): it may "
        "have changes that no shard has yet. End that first (reshard()). Modules without FSDP modules can be copied"
    )


def check_asker(door: nn.Module, keeps_names: bool) -> None:
    """Refuses a state dict to those who would do nothing with it, and say nothing.

    Args:
        keeps_names: modules have the names that keys have.

    Raises:
        ConfigurationError: on every rank alike, before anything is gathered.
    """
    for frame in islice(callers(), 1, 9):
        name, where = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name in _BY_NAMES_OF_MODULES and where.startswith("peft."):
            if frame.f_locals.get("model") is door and not keeps_names:
                raise ConfigurationError(
                    f"{name} finds no adapters in an FSDP module, whose modules have other names than its state dict. "
                    f"Call {_BY_NAMES_OF_MODULES[name]}, on all ranks"
                )
            return
        if where == "transformers.trainer" and name == "_save":
            raise ConfigurationError(
                "transformers' Trainer saves on rank 0 alone, and a sharded model is put together by all ranks. Let it "
                "know: trainer = shardkit.integrations.huggingface.ShardkitPlugin().attach(trainer); or pass "
                "save_strategy='no'"
            )
        if where == "timm.utils.model_ema":
            average = frame.f_locals.get("self")
            if door in (getattr(average, "ema", None), getattr(average, "module", None)):
                raise ConfigurationError(
                    f"timm's {type(average).__name__} writes to the values of a state dict, and those of an FSDP "
                    "module are copies, so its averages would never change. Use torch.optim.swa_utils.AveragedModel("
                    "model, multi_avg_fn=get_ema_multi_avg_fn(decay)), which averages shards; or make the average of "
                    "the model before it is wrapped"
                )
            return
