"""How ``torch.compile`` treats functions of this library: hooks, collectives and schedules are no part of a graph."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..backend import not_compiled as not_compiled
from ..types import AnyCallable

F = TypeVar("F", bound=AnyCallable)


def callees_compiled(function: F) -> F:
    """Leaves the function itself as it is; functions that it calls may be compiled."""
    not_compiled(function)
    frames, code = torch._C._dynamo.eval_frame, inspect.unwrap(function).__code__
    actions = frames._FrameAction
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))
    function._torchdynamo_disable_recursive = False  # type: ignore[attr-defined]
    return function


_as_written = threading.RLock()  # torch's switch is the process's, and ranks may be threads of one


@contextmanager
def as_written() -> Iterator[None]:
    """Runs functions that torch would compile when they are called as they were written, inside."""
    with _as_written, torch.compiler.set_stance("force_eager"):
        yield
