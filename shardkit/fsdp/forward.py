"""A forward enters a unit and leaves it: what each door does around a module's own computation.

[Note: where gathered values end] A unit is gathered in forward and again in backward so that its parameters need no
memory in between. A compiler undoes that if it can. It sees one program for the whole step, in which

1. both gathers have the same input: it may compute one of them and keep it, or gather everything at the start;
2. autograd may have saved views of the first one. ``weight.t()`` of a linear layer is a tensor of its own, so that
   backward would use what forward gathered, and nobody the second gather.

Against the first, a gather is tied (``Backend.tie``) to what it has to wait for: the inputs of the unit that computes
meanwhile, in backward the gradients of its outputs and the last reduced gradients. Against the second, what is saved
is which original parameter it is a view of, and backward takes the same view of the original parameter's value then.

[Note: methods] Other methods than forward are called through the FSDP module, too (``model.generate(x)``). They may
compute with the module's parameters, or only tell something, and nobody knows in advance. So the unit is gathered when
the first of its modules is called, which is when every rank that computes gets there, and given back when the method
returns. A method counts as one forward: gradients of what it returns flow as from forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map, tree_map_only

from ..backend import callees_compiled, not_compiled
from ..errors import LifecycleError
from ..optimizers.shards import listing_of
from ..reduction.ordered import order_in_words, ranks_of
from ..torch_seams.hooks import (
    COMPILED_AUTOGRAD,
    NO_BACKWARD,
    GradientHook,
    current_backward,
    in_fields,
    tensors_in,
    watch_halves,
    watch_outputs,
)
from ..torch_seams.tensors import local_of
from ..tracing.ranges import Range
from ..tracing.ranges import leave as leave_range
from ..tracing.tracer import training_begins
from ..types import AnyCallable, Args, Kwargs, StateDict, Tree
from ..wrapping.activations import Activations, SavedInCall
from .construct import announce, name_flats, wake
from .engine import (
    NO_THREAD,
    Engine,
    ForwardGraph,
    check_forward,
    check_one_thread,
    fx_tracing,
    jit_tracing,
    this_thread,
    transform_level,
)
from .flat_param import SUMMONED
from .originals import (
    FUNCTIONAL,
    GatheredParameter,
    Place,
    backward_when_summoned,
    get_data,
    hide,
    name_of_original,
)
from .state import ShardingState, clean, end_unshard, named_units
from .unit import UnitCall

if TYPE_CHECKING:
    from .unit import Unit

_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_LATEST = 64  # of what a module keeps in a list or dict


@not_compiled
def cast_inputs(inputs: Tree, dtype: torch.dtype) -> Tree:
    """Returns the same with floating point tensors in this dtype, those in dataclasses too."""

    def is_other(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != dtype

    def cast(leaf: Tree) -> Tree:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if is_other(leaf) else leaf
        if hasattr(leaf, "__dataclass_fields__") and any(map(is_other, tensors_in(leaf))):
            return in_fields(lambda value: cast_inputs(value, dtype), leaf)
        return leaf

    return tree_map(cast, inputs)


@callees_compiled
def run_gathered(state: ShardingState, call: AnyCallable, args: Args, kwargs: Kwargs) -> Tree:
    """Calls what computes with a unit's parameters, a module or a method of it, with these gathered."""
    entered, args, kwargs = enter(state, args, kwargs)
    try:
        outputs = call(*args, **kwargs)
    except BaseException as error:
        fail(state, entered, error)
        raise
    return leave(state, entered, outputs)


@not_compiled
def lends_memory(unit: Unit, tensors: Sequence[torch.Tensor]) -> bool:
    """Says whether one of these is an original parameter or a view of one, so that its memory is about to go."""
    for tensor in tensors:
        if type(tensor) is not torch.Tensor:
            tensor = local_of(tensor)
        for flat in unit.needs:
            memory = flat.store.memory
            if memory and torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == memory:
                return True
    return False


@not_compiled
def without_lent_memory(unit: Unit, outputs: Tree) -> Tree:
    """Returns the outputs with copies in place of original parameters and their views.

    Raises:
        LifecycleError: they are in an object whose content can't be replaced.
    """

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if lends_memory(unit, (tensor,)) else tensor

    copied = tree_map_only(torch.Tensor, owned, outputs)
    if lends_memory(unit, tensors_in(copied)):
        raise LifecycleError(
            f"rank {unit.needs[0].group.rank}: the forward of FSDP unit {unit.name or 'the root'!r} returns a "
            f"parameter, or a view of one, inside a {type(outputs).__name__}; its memory ends with forward. "
            "Return a clone() of it"
        )
    return copied


class SavedView(NamedTuple):
    """An original parameter, and how it is seen."""

    param: torch.Tensor
    view: torch.Tensor | None  # None: as it is, or transposed
    transposed: bool = False


@not_compiled
def _pack(tensor: torch.Tensor) -> torch.Tensor | SavedView:
    if (base := tensor._base) is None:
        return SavedView(tensor, None) if type(tensor) is GatheredParameter else tensor
    if type(base) is not GatheredParameter:
        return tensor
    node = tensor.grad_fn
    if node is not None and node.name() == "TBackward0":
        seen: Tree = getattr(node.next_functions[0][0], "variable", None)
        if base is seen:
            return SavedView(base, None, True)
    return SavedView(base, tensor)


@not_compiled
def _unpack(saved: torch.Tensor | SavedView) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    value = get_data(saved.param)
    if saved.view is not None:
        return saved.view._view_func_unsafe(value)  # type: ignore[attr-defined, no-any-return]
    return value.t() if saved.transposed else value


class Entered(NamedTuple):
    """A forward that is inside of a unit.

    Attributes:
        around: what ends with it.
        engine: runs it; None where parameters are summoned, and nothing is gathered.
        is_outermost: the root's forward.
        watcher: is told when backward reaches the outputs.
        range: in traces; user's code may start a profiler inside of it, which makes leaving it an error.
        page: of what autograd saves, where that goes to the host.
    """

    around: ExitStack | None
    engine: Engine | None
    is_outermost: bool
    watcher: Unit | UnitCall
    range: Range
    inputs: tuple[Args, Kwargs]
    page: SavedInCall | None = None


@not_compiled
def become_root(state: ShardingState) -> Engine:
    """Makes the engine of all units at and below a door that is called first."""
    wake(state)  # of the meta device: modules inside may have got memory meanwhile
    states = state.states()
    for listing in state.all_listings():
        if hasattr(local_of(listing.param), "fsdp_pre_all_gather") and not listing.originals[0].is_apart:
            raise LifecycleError(f"{listing.label} got fsdp_pre_all_gather too late: give it to the class")
    if transform_level() is not None:  # what is made for all later steps can't belong to one transform
        for s in states:
            check_forward(s.unit)
    reshard = state.options.reshard
    state.unit.keep_after_forward = reshard.after_forward is False or not reshard.root
    training_begins(state.group)
    after_backward = state.group.backend.mark_step if state.options.mark_step else None
    engine = Engine([*dict.fromkeys(s.unit for s in states)], reshard.prefetch, after_backward)
    names = {id(s.door): path for path, s in named_units(state.door)}
    for s in states:
        s.unit.rename([clean(names.get(id(m.door), "")) for m in s.mates or [s]])
    name_flats({s: s.unit.name or "the root" for s in states})
    for s in dict.fromkeys([*states, *state.mates]):
        if s.engine is not None and s.engine.in_place:  # a root of its own until now, and interrupted
            s.engine.forget_interrupted()
        s.engine = engine
        s.is_root = s is state or s in state.mates
        s.cast_buffers()
    originals = sum(len(flat.originals) for flat in state.all_flats())
    order = order_in_words(state.options.reduce, ranks_of(state.group, state.replicas))
    announce(state.door, len(states), originals, state.group, order)
    watch_halves(listing_of)
    return engine


def _enter_summoned(
    state: ShardingState, args: Args, kwargs: Kwargs, dtype: torch.dtype | None
) -> tuple[Entered, Args, Kwargs]:
    unit = state.unit
    state.cast_buffers()
    if dtype is not None:
        args, kwargs = cast_inputs((args, kwargs), dtype)
    with ExitStack() as stack:
        for flat in unit.needs:
            if flat.store.state is SUMMONED:
                stack.enter_context(flat.summoned_for_compute())
        entered = Entered(stack.pop_all(), None, False, unit, unit.ranges.forward(), (args, kwargs))
    return entered, args, kwargs


@not_compiled
def enter(
    state: ShardingState, args: Args, kwargs: Kwargs, is_inside: bool = False
) -> tuple[Entered, Args, Kwargs]:
    """Gathers a unit for a forward on these inputs, as they come; returns them in the dtype that it computes with.

    Inside of ``summon_full_params`` it is this rank's alone, in the dtypes of any other forward.

    Args:
        is_inside: a method of the module is running already, on these inputs as they are.
    """
    unit, dtype, options = state.unit, None, state.options
    if not is_inside and (options.casts_inputs or (options.casts_root_inputs and state.is_root is not False)):
        dtype = state.input_dtype
    if state.summoned is not None:
        return _enter_summoned(state, args, kwargs, dtype)
    compiled: Tree = sys.modules.get(COMPILED_AUTOGRAD)
    is_compiled = compiled is not None and (
        compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
    )
    is_recorded = jit_tracing() is not None or transform_level() is not None or fx_tracing()
    if is_compiled or is_recorded or torch.compiler._is_exporting_flag:
        check_forward(unit)
    engine = state.engine or become_root(state)
    for flat in unit.needs:
        if flat.store.state is SUMMONED:
            end_unshard(flat)  # of another unit that uses it
    for flat in state.flats:
        for listing in flat.listings:
            listed = listing.param
            module, name = listing.places[0]
            if module._parameters.get(name) is not listed:
                found = module._parameters.get(name)
                kind = "nothing" if found is None else f"another {type(found).__name__}"
                raise LifecycleError(
                    f"rank {flat.group.rank}: in place of the shard {name!r} ({listing.label}) there is {kind}, which "
                    "forward would ignore (functional_call does this, and assigning a parameter). Change parameters "
                    "inside of summon_full_params(), or pass functional_call the FSDP module's own parameters"
                )
            for original in listing.originals:
                for module, name in original.places:
                    found = module._parameters.get(name)
                    if found is not listed and (
                        found is not None or module.__dict__.get(name) is not original.param
                    ):
                        if found is not original.param:
                            raise LifecycleError(
                                f"rank {flat.group.rank}: parameter {name_of_original(original.param)!r} of an FSDP "
                                "module is replaced by another tensor, which forward would ignore (functional_call "
                                f"does this). {FUNCTIONAL}"
                            )
                        # it was put back, see [Note: registrations]
                        hide(Place(module, name), original.param)
    in_backward = current_backward() != NO_BACKWARD
    is_outermost = bool(state.is_root) and engine.forwards == 0 and not in_backward
    if not in_backward:
        me, other = this_thread(), engine.thread
        if other not in (me, NO_THREAD):
            check_one_thread(engine, "forward")
        engine.thread = me
    unit.began = _node_number()
    entered = Entered(None, engine, is_outermost, unit, unit.ranges.forward(), (args, kwargs))
    entered.range.__enter__()
    try:
        if is_outermost:
            engine.begin_forward()
        engine.before_forward(unit, (args, kwargs))
        if options.offload.activations and not in_backward and torch.is_grad_enabled():
            if engine.activations is None:
                engine.activations = Activations(
                    flat.store.gathered for each in engine.units for flat in each.flats
                )
            entered = entered._replace(page=engine.activations.enter(state.group.backend))
        if dtype is not None:
            args, kwargs = cast_inputs((args, kwargs), dtype)
        if unit.has_frozen and torch.is_grad_enabled():
            # backward needs frozen parameters until it has left the inputs
            entered = entered._replace(watcher=UnitCall(unit, tensors_in((args, kwargs))))
    except BaseException as error:
        fail(state, entered, error)
        raise
    if engine.is_lazy and not is_inside:
        around = ExitStack()
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # else somebody's own hooks win
            around.enter_context(saved_tensors_hooks(_pack, _unpack))
        entered = entered._replace(around=around)
    return entered, args, kwargs


def _watch_early(
    early: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], hook: GradientHook, passed: Container[int]
) -> None:
    """Calls ``hook`` where a backward reaches these before the outputs of their call: later its unit is released."""
    reached = NO_BACKWARD

    def note(gradient: torch.Tensor, enters: bool = False) -> None:
        nonlocal reached
        before, reached = reached, current_backward()
        if enters and reached != before:
            hook(gradient)

    watch_outputs(outputs, note, passed)
    for tensor in early:
        tensor.register_hook(functools.partial(note, enters=True))


@not_compiled
def leave(state: ShardingState, entered: Entered, outputs: Tree) -> Tree:
    """Gives back what the unit gathered; returns the outputs, with copies in place of memory that goes."""
    around, engine, is_outermost, watcher, in_trace, inputs, page = entered
    unit = state.unit
    if around is not None:
        around.close()
    if engine is None:

        def refuse(_: torch.Tensor) -> None:
            raise backward_when_summoned(unit.needs[0])

        if unit.needs and torch.is_grad_enabled():
            watch_outputs(tensors_in(outputs), refuse)
        return outputs
    if engine.activations is not None:
        engine.activations.leave(page)
        if is_outermost:
            engine.activations = None  # the graph alone keeps them from now on
    try:  # noqa: SIM105 - it would cost calls
        in_trace.__exit__(None, None, None)
    except RuntimeError:
        pass
    tensors: Sequence[torch.Tensor] = (outputs,) if isinstance(outputs, torch.Tensor) else tensors_in(outputs)
    if lends_memory(unit, tensors):
        try:
            outputs = without_lent_memory(unit, outputs)
        except BaseException as error:
            fail(state, entered, error)
            raise
        tensors = tensors_in(outputs)
    engine.after_forward(unit)
    if torch.is_grad_enabled():
        passed: set[int] = set()
        seen: Unit | UnitCall | ForwardGraph = watcher
        if is_outermost:
            seen = ForwardGraph(engine, watcher)
        else:
            given = (*inputs[0], *inputs[1].values()) if len(tensors) == 1 else tensors_in(inputs)
            passed.update(map(id, given))
        have_graph = watch_outputs(tensors, seen.enter_backward, passed)
        # a loss that a module keeps, and the program adds to the others: a loop, since a call would be one in each step
        early: list[torch.Tensor] = []
        for module in unit.needs[0].modules if unit.needs else ():
            attributes = module.__dict__
            for name in attributes.keys() - _OF_ALL_MODULES:
                kept = attributes[name]
                kind = type(kept)
                if kind is torch.Tensor or kind is list or kind is dict:
                    found = kept.values() if kind is dict else kept if kind is list else (kept,)
                    # the last ones: it may be a vocabulary
                    for tensor in islice(reversed(found), _LATEST):
                        node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
                        if node is not None and node._sequence_nr() >= unit.began:
                            early.append(tensor)
        if early:
            have_graph = True
            _watch_early(early, tensors, seen.enter_backward, passed)
        if engine.recording and (have_graph or unit.is_trainable):  # else no backward comes to it
            unit.is_reached = True
    if is_outermost:
        engine.end_forward()
    if engine.forwards == 0:
        engine.thread = NO_THREAD
    if state.options.clears_autocast_cache:
        torch.clear_autocast_cache()
    return outputs


@not_compiled
def fail(state: ShardingState, entered: Entered, error: BaseException) -> None:
    """Notes that a forward raised inside of the unit."""
    around, engine, is_outermost, _, in_trace, _, page = entered
    if around is not None:
        around.close()
    if engine is None:
        return
    if engine.activations is not None:
        engine.activations.leave(page)
        if is_outermost:
            engine.activations = None
    leave_range(in_trace)
    engine.fail_forward(is_outermost)
    if engine.forwards <= 0:
        engine.thread = NO_THREAD
    # what is refused is refused on all ranks; else other ranks may wait in the next unit's gather. Inside of uneven()
    # this rank goes on without computing
    goes_on = engine.state.watcher is not None
    if is_outermost and not (engine.is_lazy or goes_on or isinstance(error, LifecycleError)):
        state.group.abort(f"its forward raised {type(error).__name__}: {error}")


def through(state: ShardingState, found: Tree) -> Tree:
    """Returns an attribute of the wrapped module as the wrapper hands it out: a method gathers what it needs."""
    if not (isinstance(found, MethodType) and isinstance(found.__self__, nn.Module)):
        return found

    @functools.wraps(found)
    def call(*args: object, **kwargs: object) -> Tree:
        engine = state.engine
        if state.summoned is not None or (engine is not None and engine.forwards and state.unit.is_held):
            return found(*args, **kwargs)  # there are values
        return call_method(state, found, args, kwargs)

    return call


@not_compiled
def call_method(state: ShardingState, method: AnyCallable, args: Args, kwargs: Kwargs) -> Tree:
    """Calls a method of a module, for which its unit is gathered where that is needed; see [Note: methods]."""
    modules = {m for _, m in state.own_modules() if m is not state.door}  # which gathers by itself
    entered: list[Entered] = []  # once it was needed

    def before(module: nn.Module, inputs: object) -> None:
        if not entered and module in modules and not state.is_computing:
            entered.append(enter(state, args, kwargs, is_inside=True)[0])
            state.is_computing = True

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.enter_context(_full_state_dicts(state))
        try:
            outputs = method(*args, **kwargs)
        except BaseException as error:
            for each in entered:
                fail(state, each, error)
            raise
        finally:
            if entered:
                state.is_computing = False
    return leave(state, entered[0], outputs) if entered else outputs


@contextmanager
def _full_state_dicts(state: ShardingState) -> Iterator[None]:
    """Makes ``state_dict()`` of the wrapped module that of the wrapper, inside: ``save_pretrained`` calls it."""
    attributes: StateDict = state.module.__dict__

    def full(*args: Any, **kwargs: Any) -> StateDict:
        del attributes["state_dict"]  # the wrapper will ask the module itself
        try:
            return state.door.state_dict(*args, **kwargs)
        finally:
            attributes["state_dict"] = full

    attributes["state_dict"] = full
    try:
        yield
    finally:
        attributes.pop("state_dict", None)
