"""Full parameters, under their own names and in full precision, between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .state import ShardingState
from .unit_module import exposed


@contextlib.contextmanager
def summoned(state: ShardingState, recurse: bool, writeback: bool) -> Iterator[None]:
    """Inside, the parameters of a unit, and of those below it, are full (collective).

    Raises:
        LifecycleError: inside of forward or backward, of this or another thread.
    """
    with contextlib.ExitStack() as stack:
        for s in state.states() if recurse else [state]:
            if s.summoned is None:
                enter_summon(s, writeback)
                stack.callback(exit_summon, s)
        yield


def enter_summon(state: ShardingState, writeback: bool) -> None:
    """Begins it for one unit; :func:`exit_summon` ends it."""
    if state.engine is not None:
        state.engine.check_idle("summon_full_params")
    state.unit.release()
    stack = contextlib.ExitStack()
    for flat in state.unit.needs:
        if not flat.is_summoned:  # by another unit that uses it
            stack.enter_context(flat.summoned(writeback))
            stack.enter_context(exposed(flat))
    state.summoned = stack


def end_unshard(state: ShardingState) -> None:
    """Ends what ``unshard()`` began."""
    if state.is_unsharded:
        state.is_unsharded = False
        exit_summon(state)


def exit_summon(state: ShardingState) -> None:
    """Ends it; changes go to the shards where they are to be kept."""
    stack, state.summoned = state.summoned, None
    state.unit.release()  # asked for meanwhile
    if stack is not None:
        stack.close()
