"""One thread at a time runs the units of a root: another one would free what the first computes with."""

from __future__ import annotations

import sys
import threading
from typing import Protocol

from ..errors import LifecycleError
from ..torch_seams.hooks import NO_BACKWARD, BackwardState, current_backward, frame_of_backward

NO_THREAD = 0
this_thread = threading.get_ident


class Threaded(Protocol):
    """What runs forward and backward of the units of a root, and in which threads."""

    thread: int
    state: BackwardState


def check_one_thread(engine: Threaded, what: str) -> None:
    """Raises LifecycleError if another thread is inside of a forward or backward of this root.

    Device threads, which run parts of a backward on behalf of the thread that called it, are not taken for others.
    """
    me, task = this_thread(), current_backward()
    if engine.thread not in (NO_THREAD, me) and (task == NO_BACKWARD or _called_here()):
        raise _refusal(engine.thread, "forward", what)
    other = engine.state.thread
    if engine.state.task in (NO_BACKWARD, task) or other == me:
        return
    if _is_in_backward(other) and (task == NO_BACKWARD or _called_here()):
        raise _refusal(other, "backward", what)


def _called_here() -> bool:
    """Whether this thread called the backward that it runs."""
    return frame_of_backward(sys._getframe(1)) is not None


def _is_in_backward(thread: int) -> bool:
    return frame_of_backward(sys._current_frames().get(thread)) is not None


def _refusal(other: int, doing: str, what: str) -> LifecycleError:
    names = {t.ident: t.name for t in threading.enumerate()}
    return LifecycleError(
        f"{what} in thread {threading.current_thread().name!r} while thread {names.get(other, other)!r} is inside of "
        f"a {doing} of the same FSDP module: they would free each other's parameters. Let one thread at a time run "
        "it, the same one first on all ranks"
    )
