"""A forward enters a unit and leaves it: what every door does around the module's own computation."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from ..errors import LifecycleError
from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import NO_BACKWARD, current_backward, tensors_in, tensors_of, watch_outputs
from ..tracing.ranges import Range
from ..tracing.ranges import leave as leave_range
from ..tracing.tracer import training_begins
from ..types import Args, Kwargs, Tree
from .backward import Watcher
from .calls import lends_memory, without_lent_memory
from .construct import announce, name_flats
from .engine import Engine
from .names import clean
from .originals import Place
from .refusals import replaced_original, replaced_shard
from .registries import hide
from .state import ShardingState, state_of
from .threads import NO_THREAD, check_one_thread, this_thread
from .tracing import COMPILED_AUTOGRAD, check_forward, fx_tracing, jit_tracing, transform_level
from .unit import UnitCall


class Entered(NamedTuple):
    """A forward that is inside of a unit.

    Attributes:
        engine: runs it.
        is_outermost: the root's forward.
        watcher: is told when backward reaches the outputs.
        range: in traces; user's code may start a profiler inside of it, which makes leaving it an error.
        inputs: arguments by position and by name.
    """

    engine: Engine
    is_outermost: bool
    watcher: Watcher
    range: Range
    inputs: tuple[Args, Kwargs]


@not_compiled
def become_root(state: ShardingState) -> Engine:
    """Makes the engine of all units at and below a door that is called first."""
    states = state.states()
    names = {id(m): n for n, m in state.door.named_modules() if state_of(m) is not None}
    for s in states:
        s.unit.rename(clean(names[id(s.door)]))
        name_flats(s, s.unit.name or "the root")
        s.is_root = s is state
    reshard = state.options.reshard
    state.unit.keep_after_forward = reshard.after_forward is False or not reshard.root
    training_begins(state.group)
    after_backward = state.group.backend.mark_step if state.options.mark_step else None
    engine = Engine([s.unit for s in states], reshard.prefetch, after_backward)
    for s in states:
        s.engine = engine
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
                raise replaced_shard(listing)
            for original in listing.originals:
                for module, name in original.places:
                    found = module._parameters.get(name)
                    if found is not listed and (
                        found is not None or module.__dict__.get(name) is not original.param
                    ):
                        if found is not original.param:
                            raise replaced_original(original.param, flat.group.rank)
                        hide(Place(module, name), original.param)  # it was put back, see ``registrations.py``
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
    return entered


def enter_again(state: ShardingState) -> None:
    """A forward calls its own module once more: there is nothing to gather.

    Raises:
        LifecycleError: it is another thread's.
    """
    engine = state.engine
    if engine is not None and engine.thread not in (this_thread(), NO_THREAD):
        check_one_thread(engine, "forward")


def input_dtype(state: ShardingState) -> torch.dtype | None:
    """What floating point inputs are cast to; None leaves them."""
    options = state.options
    if not options.casts_inputs and (state.is_root is False or not options.casts_root_inputs):
        return None
    return options.precision.inputs or options.precision.compute


def watched(entered: Entered, state: ShardingState, inputs: object) -> Entered:
    """The same, with gradients of the inputs watched where backward needs frozen parameters."""
    if state.unit.has_frozen and torch.is_grad_enabled():
        return entered._replace(watcher=UnitCall.watching(state.unit, tensors_in(inputs)))
    return entered


@not_compiled
def leave(state: ShardingState, entered: Entered, outputs: Tree) -> Tree:
    """Gives back what the unit gathered; returns the outputs, with copies in place of memory that goes."""
    engine, is_outermost, watcher, in_trace, inputs = entered
    unit = state.unit
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
        if is_outermost:
            watcher = engine.watching(watcher)
        else:
            given = (*inputs[0], *inputs[1].values()) if len(tensors) == 1 else tensors_of(inputs)
            passed.update(map(id, given))
        engine.note_outputs(unit, watch_outputs(tensors, watcher.enter_backward, passed))
    if is_outermost:
        engine.end_forward()
    if engine.forwards == 0:
        engine.thread = NO_THREAD
    if state.options.clears_autocast_cache:
        torch.clear_autocast_cache()
    return outputs


@not_compiled
def fail(state: ShardingState, entered: Entered, error: BaseException) -> None:
    """A forward raised inside of the unit."""
    engine, is_outermost, _, in_trace, _ = entered
    leave_range(in_trace)
    engine.fail_forward(is_outermost)
    if engine.forwards <= 0:
        engine.thread = NO_THREAD
    # what is refused is refused on all ranks; else other ranks may wait in the next unit's gather
    if is_outermost and not engine.is_lazy and not isinstance(error, LifecycleError):
        state.group.abort(f"its forward raised {type(error).__name__}: {error}")
