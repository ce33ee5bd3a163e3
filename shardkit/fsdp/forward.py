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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map, tree_map_only

from ..errors import LifecycleError
from ..torch_seams.compiling import callees_compiled, not_compiled
from ..torch_seams.dtensors import local_of
from ..torch_seams.hooks import (
    NO_BACKWARD,
    current_backward,
    in_fields,
    tensors_in,
    tensors_of,
    watch_outputs,
)
from ..tracing.ranges import Range
from ..tracing.ranges import leave as leave_range
from ..tracing.tracer import training_begins
from ..types import AnyCallable, Args, Kwargs, StateDict, Tree
from .activations import Activations, SavedInCall
from .construct import announce, name_flats
from .engine import (
    COMPILED_AUTOGRAD,
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
from .flat_param import FlatParam
from .originals import GatheredParameter, Place, backward_when_summoned, replaced_original
from .registered import hide
from .state import ShardingState, clean, state_of
from .unit import UnitCall

if TYPE_CHECKING:
    from .unit import Unit


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
def run_summoned(module: AnyCallable, flats: Sequence[FlatParam], args: Args, kwargs: Kwargs) -> Tree:
    """Runs a forward inside of ``summon_full_params``: this rank's alone, in the dtypes of any other forward."""
    with computing_when_summoned(flats):
        outputs = module(*args, **kwargs)
    refuse_backward(flats, outputs)
    return outputs


def computing_when_summoned(flats: Sequence[FlatParam]) -> ExitStack:
    """Inside, parameters that are summoned have the dtype that forward computes with."""
    with ExitStack() as stack:
        for flat in flats:
            if flat.is_summoned:
                stack.enter_context(flat.summoned_for_compute())
        return stack.pop_all()


def refuse_backward(flats: Sequence[FlatParam], outputs: object) -> None:
    """Raises in a backward through what was computed when summoned."""

    def refuse(_: torch.Tensor) -> None:
        raise backward_when_summoned(flats[0])

    if flats and torch.is_grad_enabled():
        watch_outputs(tensors_of(outputs), refuse)


@not_compiled
def lends_memory(unit: Unit, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these is a view of an original parameter (or one itself), so that its memory is about to go."""
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
    if lends_memory(unit, tensors_of(copied)):
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
    base = tensor._base
    if base is None:
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
    value = saved.param.data
    if saved.view is not None:
        return saved.view._view_func_unsafe(value)  # type: ignore[attr-defined, no-any-return]
    return value.t() if saved.transposed else value


@not_compiled
def saving_originals_by_name() -> AbstractContextManager[object]:
    """Inside, what autograd saves of original parameters is taken anew in backward; see the note above.

    Somebody else's hooks for saved tensors (activation checkpointing, offloading, an outer unit's) win.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


class Entered(NamedTuple):
    """A forward that is inside of a unit.

    Attributes:
        engine: runs it.
        is_outermost: the root's forward.
        watcher: is told when backward reaches the outputs.
        range: in traces; user's code may start a profiler inside of it, which makes leaving it an error.
        page: of what autograd saves, where that goes to the host.
    """

    engine: Engine
    is_outermost: bool
    watcher: Unit | UnitCall
    range: Range
    inputs: tuple[Args, Kwargs]
    page: SavedInCall | None = None


@not_compiled
def become_root(state: ShardingState) -> Engine:
    """Makes the engine of all units at and below a door that is called first."""
    states = state.states()
    names = {id(m): n for n, m in state.door.named_modules() if state_of(m) is not None}
    for s in states:
        s.unit.rename([clean(names.get(id(m.door), "")) for m in s.mates or [s]])
    name_flats({s: s.unit.name or "the root" for s in states})
    reshard = state.options.reshard
    state.unit.keep_after_forward = reshard.after_forward is False or not reshard.root
    training_begins(state.group)
    after_backward = state.group.backend.mark_step if state.options.mark_step else None
    engine = Engine([*dict.fromkeys(s.unit for s in states)], reshard.prefetch, after_backward)
    for s in dict.fromkeys([*states, *state.mates]):
        s.engine = engine
        s.is_root = s is state or s in state.mates
        s.cast_buffers()
    originals = sum(len(flat.originals) for flat in state.all_flats())
    announce(state.door, len(states), originals, state.group)
    return engine


@not_compiled
def enter(state: ShardingState, args: Args, kwargs: Kwargs) -> Entered:
    """Gathers a unit for a forward on these inputs, as they come."""
    unit = state.unit
    compiled: Tree = sys.modules.get(COMPILED_AUTOGRAD)
    if (
        jit_tracing() is not None or transform_level() is not None or fx_tracing()
        or torch.compiler._is_exporting_flag
        or (compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region))
    ):  # fmt: skip
        check_forward(unit)
    engine = state.engine or become_root(state)
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
                            raise replaced_original(original.param, flat.group.rank)
                        # it was put back, see [Note: registrations]
                        hide(Place(module, name), original.param)
    in_backward = current_backward() != NO_BACKWARD
    is_outermost = bool(state.is_root) and engine.forwards == 0 and not in_backward
    if not in_backward:
        me, other = this_thread(), engine.thread
        if other not in (me, NO_THREAD):
            check_one_thread(engine, "forward")
        engine.thread = me
    entered = Entered(engine, is_outermost, unit, unit.ranges.forward(), (args, kwargs))
    entered.range.__enter__()
    try:
        if is_outermost:
            engine.begin_forward()
        engine.before_forward(unit, (args, kwargs))
    except BaseException as error:
        fail(state, entered, error)
        raise
    if state.options.offload.activations and not in_backward and torch.is_grad_enabled():
        if engine.activations is None:
            engine.activations = Activations(
                flat.store.gathered for each in engine.units for flat in each.flats
            )
        return entered._replace(page=engine.activations.enter(state.group.backend))
    return entered


def enter_again(state: ShardingState) -> None:
    """Notes that a forward calls its own module once more: there is nothing to gather.

    Raises:
        LifecycleError: it is another thread's.
    """
    engine = state.engine
    if engine is not None and engine.thread not in (this_thread(), NO_THREAD):
        check_one_thread(engine, "forward")


def input_dtype(state: ShardingState) -> torch.dtype | None:
    """Returns the dtype of floating point inputs where not every unit's are cast; None leaves them."""
    options = state.options
    if not options.casts_inputs and (state.is_root is False or not options.casts_root_inputs):
        return None
    return state.input_dtype


def watched(entered: Entered, state: ShardingState, inputs: object) -> Entered:
    """Returns the same, with gradients of the inputs watched where backward needs frozen parameters."""
    if state.unit.has_frozen and torch.is_grad_enabled():
        return entered._replace(watcher=UnitCall.watching(state.unit, tensors_in(inputs)))
    return entered


def _leave_page(
    engine: Engine, activations: Activations, page: SavedInCall | None, is_outermost: bool
) -> None:
    if page is not None:
        activations.leave(page)
    if is_outermost:
        activations.settle()
        engine.activations = None  # the graph alone keeps them from now on


@not_compiled
def leave(state: ShardingState, entered: Entered, outputs: Tree) -> Tree:
    """Gives back what the unit gathered; returns the outputs, with copies in place of memory that goes."""
    engine, is_outermost, watcher, in_trace, inputs, page = entered
    unit = state.unit
    if engine.activations is not None:
        _leave_page(engine, engine.activations, page, is_outermost)
    try:  # noqa: SIM105 - it would cost calls
        in_trace.__exit__(None, None, None)
    except RuntimeError:
        pass
    tensors = (outputs,) if isinstance(outputs, torch.Tensor) else tensors_of(outputs)
    if lends_memory(unit, tensors):
        try:
            outputs = without_lent_memory(unit, outputs)
        except BaseException as error:
            fail(state, entered, error)
            raise
        tensors = tensors_of(outputs)
    engine.after_forward(unit)
    if torch.is_grad_enabled():
        passed: set[int] = set()
        seen: Unit | UnitCall | ForwardGraph = watcher
        if is_outermost:
            seen = engine.watching(watcher)
        else:
            given = (*inputs[0], *inputs[1].values()) if len(tensors) == 1 else tensors_of(inputs)
            passed.update(map(id, given))
        have_graph = watch_outputs(tensors, seen.enter_backward, passed)
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
    engine, is_outermost, _, in_trace, _, page = entered
    if engine.activations is not None:
        _leave_page(engine, engine.activations, page, is_outermost)
    leave_range(in_trace)
    engine.fail_forward(is_outermost)
    if engine.forwards <= 0:
        engine.thread = NO_THREAD
    # what is refused is refused on all ranks; else other ranks may wait in the next unit's gather
    if is_outermost and not engine.is_lazy and not isinstance(error, LifecycleError):
        state.group.abort(f"its forward raised {type(error).__name__}: {error}")


def through(state: ShardingState, found: Tree) -> Tree:
    """Returns an attribute of the wrapped module as the wrapper hands it out: a method gathers what it needs."""
    if isinstance(found, MethodType) and isinstance(found.__self__, nn.Module):
        return _call_of(state, found)
    return found


def _call_of(state: ShardingState, method: AnyCallable) -> AnyCallable:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Tree:
        engine = state.engine
        if state.summoned is not None or (engine is not None and engine.forwards and state.unit.is_held):
            return method(*args, **kwargs)  # there are values
        return MethodCall(state).run(method, args, kwargs)

    return call


class MethodCall:
    """One call of a method; see above."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state
        self._modules = {m for _, m in state.own_modules() if m is not state.door}  # which gathers by itself
        self._entered: Entered | None = None
        self._args: Args = ()
        self._kwargs: Kwargs = {}

    @not_compiled
    def run(self, method: AnyCallable, args: Args, kwargs: Kwargs) -> Tree:
        """Calls the method."""
        self._args, self._kwargs = args, kwargs
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._before).remove)
            stack.enter_context(_full_state_dicts(self._state))
            try:
                outputs = method(*args, **kwargs)
            except BaseException as error:
                if self._entered is not None:
                    fail(self._state, self._entered, error)
                raise
            finally:
                if self._entered is not None:
                    self._state.is_computing = False
        return outputs if self._entered is None else leave(self._state, self._entered, outputs)

    def _before(self, module: nn.Module, inputs: object) -> None:
        if self._entered is None and module in self._modules and not self._state.is_computing:
            entered = enter(self._state, self._args, self._kwargs)
            self._state.is_computing = True
            self._entered = watched(entered, self._state, (self._args, self._kwargs))


@contextmanager
def _full_state_dicts(state: ShardingState) -> Iterator[None]:
    """Inside, ``state_dict()`` of the wrapped module is that of the wrapper: ``save_pretrained`` calls it."""
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
