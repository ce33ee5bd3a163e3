"""Parameters of a unit as the rest of a program meets them: with values, or released.

[Note: released] While a unit is not gathered, its original parameters have a shape and no memory. Reading one would end
the process, or show what lies there now; writing one would be forgotten. So they change their class with their memory.
A released one answers what it is (its shape, its gradient), and raises for all that needs values. Inside forward
and backward they are parameters like any other, and operations on them cost nothing more. Functions that would read
weights past the modules that hold them (the fast path of ``nn.TransformerEncoderLayer``) look for tensors that
watch what is done with them, and take the path through the modules then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Group
from ..errors import LifecycleError
from ..layout import ShardLayout
from ..reduction.compression import BlockFormat
from ..torch_seams.tensor_facts import ALIKE, FACTS, SHAPE, name_of
from ..tracing.ranges import UnitRanges
from ..types import AnyCallable, Args, Kwargs, Memo, Tree
from .unused import Unused

# A context in which released original parameters are taken for what they are, tensors, and nothing is called for them.
as_tensors = torch._C.DisableTorchFunctionSubclass


_GRADIENT = frozenset({"get grad", "get _grad", "set grad", "set _grad", "delete grad"})


class GatheredParameter(nn.Parameter):
    """A parameter whose values are a part of a gathered flat parameter. A copy of it is a parameter of its own."""

    _has_full_param = True  # as torch_xla's FSDP says it

    def __deepcopy__(self, memo: Memo) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return nn.Parameter, (self.data.clone(), self.requires_grad)


class ViewOfShard(GatheredParameter):
    """A parameter of which this rank's shard has all: its values are true at any time, its gradient is the shard's."""

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
            raise LifecycleError(_refusal(param, resolve_name(func) or what))

    def __deepcopy__(self, memo: Memo) -> nn.Parameter:
        owner = _owner_of(self)
        if owner is not None and id(owner.flat) not in memo.get(_COPIED, ()):
            raise LifecycleError(_refusal(self, "a copy"))
        if id(self) not in memo:
            memo[id(self)] = _without_owner(self.dtype, self.requires_grad, _name(self))
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return _without_owner, (self.dtype, self.requires_grad, _name(self))


class ReleasedView(torch.Tensor):
    """A view of a released parameter that a program kept; see ``kept_views.py``."""

    __torch_function__ = ReleasedParameter.__torch_function__


class Place(NamedTuple):
    """Where a parameter is an attribute."""

    module: nn.Module
    name: str


@dataclass
class OriginalParameter:
    """One of the original parameters in a flat parameter, and all places where it is found.

    Attributes:
        kind: its class while it has values: a user's own, or ours.
    """

    param: nn.Parameter
    places: list[Place]
    shape: torch.Size = field(init=False)
    kind: type[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = torch.Size() if is_lazy(self.param) else self.param.shape
        self.kind = GatheredParameter if type(self.param) is nn.Parameter else type(self.param)


class Listing(Protocol):
    """What one registered parameter is listed for: all of a flat parameter, or one original parameter of it.

    Attributes:
        flat: the flat parameter.
        first: number of its first original parameter in the flat parameter.
        originals: in the order in which they lie in it.
        names: path of each in the unit's module.
        path: the unit's path in the root module, as far as it is known.
        label: what it is called in errors.
        param: the registered parameter.
        places: where it is listed.
        layout: how its original parameters are cut between ranks.
        group: ranks that share it.
        compute_device: device of the original parameters while gathered.
    """

    param: nn.Parameter
    layout: ShardLayout

    @property
    def first(self) -> int: ...

    @property
    def flat(self) -> FlatParamLike: ...

    @property
    def originals(self) -> list[OriginalParameter]: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def path(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def places(self) -> list[Place]: ...

    @property
    def group(self) -> Group: ...

    @property
    def compute_device(self) -> torch.device: ...


class FlatParamLike(Listing, Protocol):
    """What a :class:`FlatParam` is to those below it; its attributes are described there."""

    post_forward_mesh: Group | None
    modules: Sequence[nn.Module]
    unused: Unused
    written: list[int]
    hears: Callable[[torch.Tensor, torch.Tensor], object] | None
    ranges: UnitRanges

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def compute_device(self) -> torch.device: ...

    @property
    def blocks(self) -> BlockFormat | None: ...

    @property
    def keeps_shapes(self) -> bool: ...

    @property
    def gathered(self) -> torch.Tensor: ...

    @property
    def listings(self) -> Sequence[Listing]: ...


class Owner(NamedTuple):
    """The flat parameter that holds an original parameter's values, and which of those in it this is."""

    flat: FlatParamLike
    number: int


# One wrapped unit may meet a parameter that another one manages. Flat parameters, which hold these, are held weakly:
# else neither would ever be freed.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
_views: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of original parameters, that a program keeps
_names_of_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_COPIED: Any = "flat parameters that are being copied"  # beside the ids in the memo of a deepcopy


def _owner_of(param: torch.Tensor, noted: WeakIdKeyDictionary = _owners) -> Owner | None:
    found: tuple[weakref.ref[FlatParamLike], int] | None = noted.get(param)
    flat = None if found is None else found[0]()
    return None if found is None or flat is None else Owner(flat, found[1])


def managing(param: nn.Parameter) -> FlatParamLike | None:
    """The flat parameter that manages an original parameter, None for other parameters."""
    owner = _owner_of(param)
    return None if owner is None else owner.flat


def note_original(param: nn.Parameter, flat: FlatParamLike, index: int) -> None:
    """From now on this parameter is known to be that original parameter of that flat parameter."""
    _owners[param] = (weakref.ref(flat), index)


def note_view(tensor: torch.Tensor, param: nn.Parameter) -> None:
    """This tensor, which is about to become released, is a view of that original parameter."""
    _views[tensor] = _owners[param]


def note_copying(flats: Sequence[FlatParamLike], memo: Memo) -> None:
    """Parameters of these may be copied without values: the flat parameters are copied too, and fill the copies."""
    memo.setdefault(_COPIED, set()).update(id(f) for f in flats)


def are_copied(flats: Sequence[FlatParamLike], memo: Memo) -> bool:
    """Whether they belong to something around them that is being copied."""
    return bool(flats) and memo.get(_COPIED, set()).issuperset(id(f) for f in flats)


def name_of_original(param: nn.Parameter) -> str | None:
    """Full name of an original parameter, as far as it is known; None for other parameters."""
    return _name(param) if _owner_of(param) is not None else None


def _of_full_shape(param: torch.Tensor, what: str) -> torch.Tensor:
    """The parameter, or where it has lost its shape too (lazy execution) one that is like it."""
    owner = _owner_of(param)
    if owner is None or owner.flat.keeps_shapes:
        return param
    shape = owner.flat.originals[owner.number].shape
    return torch.empty(shape, dtype=param.dtype, device=param.device if what in ALIKE else "meta")


def _name(param: torch.Tensor) -> str:
    owner = _owner_of(param)
    return str(_names_of_copies.get(param, "of an FSDP module")) if owner is None else _name_in(owner)


def _name_in(owner: Owner) -> str:
    name = owner.flat.names[owner.number]
    return f"{owner.flat.path}.{name}" if owner.flat.path else name


def _described(param: ReleasedParameter | ReleasedView) -> str:
    shape = tuple(_of_full_shape(param, "shape").shape)
    return f"<parameter {_name(param)!r} of shape {shape}, {param.dtype}, sharded: it has no values here now>"


def _refusal(param: ReleasedParameter | ReleasedView, what: str) -> str:
    seen = _owner_of(param, _views)
    if seen is not None:
        return _refusal_of_view(seen, what)
    owner, name = _owner_of(param), _name(param)
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


def _refusal_of_view(owner: Owner, what: str) -> str:
    group, name = owner.flat.group, _name_in(owner)
    return (
        f"rank {group.ranks[group.rank]}: {what} needs the values of a view of parameter {name!r} that was kept "
        f"from a forward: the parameter is sharded over {group.world_size} ranks and not gathered now, and the view "
        "has no memory then. Keep a clone() of it, or read it inside of the forward of the FSDP module that holds the "
        "parameter"
    )


def refuse_copy(param: ReleasedParameter, what: str) -> None:
    """Raises for a parameter that was copied, or came from a file, without the flat parameter that has its values."""
    if _owner_of(param) is None:
        raise LifecycleError(_refusal(param, what))


def _refuse_gradient(param: torch.Tensor) -> None:
    """Raises where the parameter's gradient was reduced: what is read or set here would not be it."""
    owner = _owner_of(param)
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


def _without_owner(dtype: torch.dtype, requires_grad: bool, name: str) -> nn.Parameter:
    """A copy; the copy of its flat parameter, if there is one, will give it values."""
    param = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=requires_grad)
    _names_of_copies[param] = name
    param.__class__ = ReleasedParameter
    return param
