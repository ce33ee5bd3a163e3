"""Modules inside of a unit: what they answer when they are asked themselves, and what may be put into them.

[Note: inside] Parameters are taken out of their modules when a module is wrapped, so that ``parameters()`` of a model
lists shards alone. Code of the wrapped module, and libraries that know nothing of wrapping, ask the modules inside:
for their dtype and device (the first of ``parameters()``), to freeze a part, for the names of adapters. Asked directly,
a module inside therefore lists the parameters that it was written with, under their own names: gathered or not, they
have a shape, and what is set in ``requires_grad`` counts. (Listing goes down a tree by ``_parameters`` and
``named_modules(memo)``, so that modules around do not see this.) Their values are another matter: a state dict of a
module inside would lack parameters, or have a shard in place of one, and is refused outside of ``summon_full_params``.

[Note: registrations] Parameters are taken out of their modules when a module is wrapped. One that is registered
later (a new head, an adapter, a parametrization, a larger embedding) would be in no flat parameter: each rank would
train its own. It is refused where torch registers it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import ConfigurationError, LifecycleError
from ..flattening.wrapper import FlatParameter
from ..optimizers.shards import has_stand_ins, listing_of, note_listings, shard_behind
from ..torch_seams.tensors import is_dtensor
from ..types import AnyCallable, IncompatibleKeys, Memo, StateDict, Tree
from .flat_param import GATHERED, Registered
from .originals import ORDER, Place, ReleasedParameter, hidden, managing, owner_of, refusal_of, written_names
from .state import ShardingState, clean, owners_of


class Answer:
    """Stands in for a method of a module inside; follows the module when that is copied or pickled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        raise NotImplementedError

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        if (module := self._module()) is None:
            raise LifecycleError("the module that was asked for its parameters is gone")
        return module

    @property
    def __func__(self) -> object:
        """Returns what a method has here: torch's compiler asks whether it is the one of ``nn.Module``."""
        return type(self).__call__

    def __deepcopy__(self, memo: Memo) -> Answer:
        return type(self)(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[type, tuple[nn.Module]]:
        return type(self), (self.module,)


class ParametersInUse(Answer):
    """``named_parameters`` of a module that is sharded in place, or inside of one: what it lists, or computes with.

    A forward that asks its own module gets what torch's ``fully_shard`` has there: whole values for a norm, and the
    dtype of the computation (``next(self.parameters()).dtype``).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        module = self.module
        for name, listed in type(module).named_parameters(module, *args, **kwargs):
            yield name, _in_use(module, listed)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Is ``_apply`` of such a module inside of a unit that lists DTensors."""
        refuse_sharing(self.module, fn)
        return type(self.module)._apply(self.module, fn, recurse)  # type: ignore[no-any-return]


def _in_use(module: nn.Module, listed: nn.Parameter) -> nn.Parameter:
    """Returns the original parameter for what is listed of it, while a forward or backward has its values."""
    listing = listing_of(listed)
    if listing is None or len(listing.originals) > 1 or listing.flat.store.state is not GATHERED:
        return listed
    # what an exception, or a call of one unit alone, has left is nobody's
    if not torch.compiler.is_compiling():
        engine = module.__dict__[_MANAGED].state().engine
        if engine is None or not engine.is_inside():
            return listed
    return listing.originals[0].param


class NamedParameters(Answer):
    """``named_parameters`` of a module inside of a unit: its own, under the names they had before wrapping."""

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module = self.module
        tree = nn.Module.named_modules(module, None, "", remove_duplicate) if recurse else [("", module)]
        seen: set[int] = set()
        for path, m in tree:
            taken = dict(hidden(m))
            for name in written_names(m):
                param = m._parameters.get(name, taken.get(name))
                if param is None or isinstance(param, FlatParameter) or id(param) in seen:
                    continue
                if remove_duplicate:
                    seen.add(id(param))
                yield ".".join(part for part in (prefix, clean(path), name) if part), _in_use(m, param)


class NamedModules(Answer):
    """``named_modules`` of a module inside with units below it: under the names they had before wrapping."""

    def __call__(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        tree = nn.Module.named_modules(self.module, memo, prefix, remove_duplicate)
        if memo is not None:  # a module around is asked
            yield from tree
        else:
            yield from ((clean(path), m) for path, m in tree)


class Moves(Answer):
    """``_apply`` of a module inside of a unit, by which it is moved and cast: its parameters are not its own."""

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        for name, original in [] if _collecting.depth else hidden(module):
            if (flat := managing(original)) is None:
                continue
            shard, group = flat.param, flat.group
            moved = fn(torch.empty(0, dtype=shard.dtype, device=shard.device))
            if (moved.dtype, moved.device.type) != (shard.dtype, shard.device.type):
                raise LifecycleError(
                    f"rank {group.ranks[group.rank]}: a {type(module).__name__} inside of an FSDP module can't be "
                    f"moved or cast by itself: its parameter {name!r} is in a shard of the unit around it. Call to(), "
                    "half() and the like of the FSDP module"
                )
        return type(module)._apply(module, fn, recurse)  # type: ignore[no-any-return]


def refuse_sharing(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises ConfigurationError where a module that lists DTensors is to be shared between processes."""
    if "share_memory_" in getattr(getattr(fn, "__code__", None), "co_names", ()):
        raise ConfigurationError(
            f"share_memory() of a {type(module).__name__} whose parameters are DTensors, at which torch ends the "
            "process. Share what each rank has of them: param.to_local().share_memory_()"
        )


class ZeroGrad(Answer):
    """``zero_grad`` of a module inside of a unit: clears gradients of shards that are of its parameters alone.

    Trainers that hold the module that they wrapped call it there. Where a shard is of others' too, or gradients are to
    be zeros, it raises.
    """

    def __call__(self, set_to_none: bool = True) -> None:
        module = self.module
        inside = {id(p): managing(p) for m in module.modules() for _, p in hidden(m)}
        for listing in {listing for flat in inside.values() if flat is not None for listing in flat.listings}:
            if set_to_none and inside.keys() >= {id(original.param) for original in listing.originals}:
                listing.param.grad = None
        type(module).zero_grad(module, set_to_none)


class KeepsInStep:
    """Says whether forwards of a module are ones of all ranks; true or false when transformers asks.

    If so, a rank whose sequences are complete goes on in ``generate`` until those of all ranks are.
    """

    def __init__(self, state: ShardingState) -> None:
        self.state = weakref.ref(state)

    def __bool__(self) -> bool:
        state = self.state()
        return state is not None and state.summoned is None

    def __deepcopy__(self, memo: Memo) -> KeepsInStep | bool:
        copied = memo.get(id(self.state()))  # nothing where a module inside is copied alone
        return KeepsInStep(copied) if isinstance(copied, ShardingState) else False

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (True,)  # made anew with what it is in


class _Collecting(threading.local):  # ranks may be threads of one process
    depth = 0

    def __init__(self) -> None:
        self.loading: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_collecting = _Collecting()


@contextmanager
def collecting() -> Iterator[None]:
    """Says that an FSDP module makes or loads a state dict, or moves, and takes care of the modules inside of it."""
    _collecting.depth += 1
    try:
        yield
    finally:
        _collecting.depth -= 1


def is_collecting() -> bool:
    """Says whether this is inside of that."""
    return _collecting.depth > 0


def collect_in_place(change: int) -> None:
    """Does the same where torch's hooks tell of the beginning (1) and the end (-1)."""
    _collecting.depth += change


def begin_loading_shards(wrapper: nn.Module) -> None:
    """Notes that an FSDP module, and modules inside of it, load shards from here on; torch says when it begins."""
    _collecting.loading.add(wrapper)


def end_loading_shards(wrapper: nn.Module, incompatible: IncompatibleKeys | None = None) -> None:
    """Ends it: a hook after loading."""
    _collecting.loading.discard(wrapper)


def answer_for(modules: Sequence[nn.Module], in_place: bool, lists_dtensors: bool) -> None:
    """Lets the modules of a unit answer as above."""
    if in_place:
        for m in modules:
            m.__dict__["named_parameters"] = answer = ParametersInUse(m)
            if lists_dtensors:  # a door gets another one, or has it
                m.__dict__.setdefault("_apply", answer.apply)
        return
    own: set[nn.Module | None] = {None, *modules}
    around = {m for m in modules if not own.issuperset(m._modules.values())}
    known = 0
    while around and known < len(around):
        known = len(around)
        around.update([m for m in reversed(modules) if not around.isdisjoint(m._modules.values())])
    for m in modules:
        m.__dict__["named_parameters"] = NamedParameters(m)
        m.__dict__["_apply"] = Moves(m)
        m.__dict__["zero_grad"] = ZeroGrad(m)
    for m in around:
        m.__dict__["named_modules"] = NamedModules(m)


def take(state: ShardingState, modules: Sequence[nn.Module]) -> None:
    """Makes modules a unit's: state dicts of one inside alone, which would lack values, and new parameters are refused.

    What is a door in place puts its state dicts together itself.
    """
    _watch()
    keeps_in_step, takes_parameters = KeepsInStep(state), state.group.backend.has_storage
    doors = [mate.door for mate in state.mates] if state.mates else [state.door]
    if state.unit_module is not None:
        for wrapper in (state.door, state.unit_module):
            wrapper.__dict__[_MANAGED] = keeps_in_step
    for m in modules:
        m.__dict__[_MANAGED] = keeps_in_step
        # torch.compile takes modules that say so, parameters and all; where execution is lazy these change under it
        m.__dict__["_fsdp_use_orig_params"] = takes_parameters
        if (
            (m._parameters or ORDER in m.__dict__)
            and m not in doors
            and _refuse_state_dict not in m._state_dict_pre_hooks.values()  # copies have them already
        ):
            m.register_state_dict_pre_hook(_refuse_state_dict)
            m.register_load_state_dict_pre_hook(_refuse_loading)


def _shards_of(module: nn.Module) -> dict[str, Registered]:
    """Returns the names of parameters whose values the module has not, and the flat parameters that have them."""
    found: dict[str, Registered | None] = {n: managing(p) for n, p in hidden(module)}
    for name, param in module._parameters.items():
        flat = None if param is None else shard_behind(param)
        if flat is not None and flat.group.world_size > 1 and not is_dtensor(param):
            found[name] = flat
    return {name: flat for name, flat in found.items() if flat is not None}


def _refuse_copies(module: nn.Module, what: str) -> None:
    """Refuses a module from a file without the FSDP module around it: its parameters have no values."""
    for _, original in hidden(module):
        if isinstance(original, ReleasedParameter) and owner_of(original) is None:
            raise LifecycleError(refusal_of(original, what))


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _refuse_copies(module, "state_dict()")
    if not _collecting.depth:
        _refuse(module, "state_dict()", _shards_of(module))


def _refuse_loading(module: nn.Module, state_dict: StateDict, prefix: str, *others: object) -> None:
    _refuse_copies(module, "load_state_dict()")
    if not _collecting.depth and not _collecting.loading:
        shards = _shards_of(module)
        _refuse(module, "load_state_dict()", {n: f for n, f in shards.items() if prefix + n in state_dict})


def _refuse(module: nn.Module, what: str, shards: dict[str, Registered]) -> None:
    if shards:
        name, flat = next(iter(shards.items()))
        group = flat.group
        raise LifecycleError(
            f"rank {group.ranks[group.rank]}: {what} of a {type(module).__name__} inside of an FSDP module: its "
            f"parameter {name!r} is sharded over {group.world_size} ranks. Call {what} of the FSDP module instead, on "
            "all ranks, or call this one inside of its summon_full_params()"
        )


_MANAGED = "_is_fsdp_managed_module"  # transformers asks for it


def _is_taken(module: nn.Module) -> bool:
    """Says whether a unit has taken a module's parameters, or those of one around it, but in no other unit."""
    return isinstance(module.__dict__.get(_MANAGED), KeepsInStep)


@functools.cache
def _watch() -> None:
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(cast("AnyCallable", _on_parameter))  # its type lacks a result
    torchs = nn.utils.parametrize.ParametrizationList, nn.utils.parametrizations._SpectralNorm
    for owner, name in (
        *((kind, "__init__") for kind in torchs),
        *((old, "apply") for old in (WeightNorm, SpectralNorm)),
        (nn.utils.parametrize, "register_parametrization"),
    ):
        setattr(owner, name, _refusing(getattr(owner, name)))


def _refusing(function: AnyCallable) -> AnyCallable:
    """Makes a function of torch's, which takes a parameter out of its module, refuse one that is sharded first."""

    @functools.wraps(function)
    def checked(*args: Tree, **kwargs: Tree) -> Tree:
        module, what, *_ = given = [*args, *kwargs.values()]
        for param in (getattr(module, what, None) if isinstance(what, str) else None, *given):
            if (flat := managing(param) or listing_of(param)) is not None:
                (place, *_), *_ = [o.places for o in flat.originals if o.param is param] or [flat.places]
                raise ConfigurationError(_too_late(place.module, f"{place.name}.original"))
        return function(*args, **kwargs)

    return checked


def _on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or not _is_taken(parent) or parent._modules.get(name) is child:
        return
    new = [(path, m) for path, m in child.named_modules(prefix=name) if not _is_taken(m)]
    for path, m in new:
        for attribute, param in m._parameters.items():
            if param is not None and shard_behind(param) is None:
                raise ConfigurationError(_too_late(parent, f"{path}.{attribute}"))
    for _, m in new:
        if not any(p is not None for p in m._parameters.values()):  # no other unit's
            m.__dict__[_MANAGED] = parent.__dict__[_MANAGED]


def _on_parameter(parent: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or not _is_taken(parent) or param is parent._parameters.get(name):
        return None
    before = parent._parameters.get(name)
    if isinstance(before, FlatParameter) or isinstance(param, FlatParameter):
        return None  # forward says that it would ignore another one
    listing = None if before is None else listing_of(before)
    if listing is not None and is_dtensor(listing.param):
        if is_collecting():  # load_state_dict(assign=True)
            return _assigned(listing, param)
        if _takes_place(Place(parent, name), listing, param):
            return None
    flat = managing(param)
    if flat is not None and any(o.param is param and (parent, name) in o.places for o in flat.originals):
        if listing is not None and any(o.param is param for o in listing.originals):
            # Tied once more: it stays an attribute beside the shard that is listed for it.
            parent.__dict__[name] = param
            return listing.param
        return None  # torch puts back what it replaced for a call; the next forward hides it again
    # else it is summoned, and takes another one's values; a tie would end with that
    if before is None or managing(before) is None or flat is not None or listing_of(param) is not None:
        raise ConfigurationError(_too_late(parent, name))
    return None


def _takes_place(place: Place, listing: Tree, values: Tree) -> bool:
    """Says whether another DTensor is listed there from now on, which is possible until the first forward: one listed
    elsewhere, so that both are tied, or a new one.
    """
    own, flat, kept = listing.param, listing.flat, listing_of(values)
    state: ShardingState = place.module.__dict__[_MANAGED].state()
    units = [state, *owners_of([flat] if kept is None else [flat, kept.flat])]
    device = values.device if own.is_meta else own.device  # computed of weights that were filled before
    if (
        not is_dtensor(values)
        or (values._spec, values.dtype, values.device) != (own._spec, own.dtype, device)
        or (kept is None and len(listing.places) > 1)
        or any(unit.engine is not None or unit.summoned is not None for unit in units)
    ):
        return False
    if kept is None:
        # its memory is followed where it is needed
        flat.shards.params[listing.first] = listing.param = values
        note_listings([listing])
        return True
    if has_stand_ins(flat.param):
        raise ConfigurationError(
            f"{listing.label} is tied with {kept.label} after a WholeParameters was made of it: make the optimizer "
            "afterwards"
        )
    state.tie(place, listing, kept)
    return True


@torch.no_grad()
def _assigned(listing: Registered, values: nn.Parameter) -> nn.Parameter:
    """Keeps the parameter that is listed, with these values: optimizers have it, and its memory is the shard's.

    One on the meta device gives way; its unit takes the others' values once all of them are there.
    """
    own: Tree = listing.param
    if own.is_meta and not values.is_meta:
        if is_dtensor(values) and (values.placements, values.device_mesh) == (
            own.placements,
            own.device_mesh,
        ):
            return values  # type: ignore[return-value]
        raise ConfigurationError(
            f"load_state_dict(assign=True) into {listing.label}, which was sharded on the meta device, of a tensor "
            f"that is not cut as it is: expected a DTensor with {own.placements} over {own.device_mesh}, or a plain one"
        )
    own.copy_(values)
    return listing.param


def _too_late(module: nn.Module, name: str) -> str:
    return (
        f"parameter {name!r} is put into a {type(module).__name__} whose parameters FSDP has sharded: it would belong "
        "to no unit, and each rank would train its own. Change the module (heads, adapters, parametrizations, "
        "embeddings, tied weights) before it is wrapped, or wrap what is new in a unit of its own"
    )
