"""How ``torch.compile`` treats functions of this library: hooks, collectives and schedules are no part of a graph.

``torch.compiler.disable`` says the same, but imports the whole compiler (seconds) whether it is used or not. These
marks are what it leaves on a function.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..types import AnyCallable

F = TypeVar("F", bound=AnyCallable)
_eval_frame = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT


def _marked(function: F, callees: torch._C._dynamo.eval_frame._FrameAction) -> F:
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, callees))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardkit runs it outside of the graph"  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """The function and all that it calls run as they are."""
    marked = _marked(function, _SKIP)
    marked._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    return marked


def callees_compiled(function: F) -> F:
    """The function itself runs as it is; functions that it calls may be compiled."""
    marked = _marked(function, _DEFAULT)
    marked._torchdynamo_disable_recursive = False  # type: ignore[attr-defined]
    return marked


_as_written = threading.RLock()  # torch's switch is the process's, and ranks may be threads of one


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, functions that torch would compile when they are called run as they were written."""
    with _as_written, torch.compiler.set_stance("force_eager"):
        yield
