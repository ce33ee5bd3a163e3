"""What collectives are: how contributions are combined, and what is in flight."""

from __future__ import annotations

import abc
import enum
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

import torch

from .types import AnyCallable

F = TypeVar("F", bound=AnyCallable)
_eval_frame = torch._C._dynamo.eval_frame


class ReduceOp(enum.Enum):
    """How contributions of ranks are combined. AVG (of real or complex numbers) divides the sum by the world size."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"


def not_compiled(function: F) -> F:
    """Says to ``torch.compile`` that a function and all that it calls run as they are, outside of every graph.

    ``torch.compiler.disable`` says the same, but imports the whole compiler (seconds) whether it is used or not. These
    marks are what it leaves on a function.
    """
    skip = _eval_frame._FrameAction.SKIP
    code = inspect.unwrap(function).__code__  # a decorator's is that of all that it decorates
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardkit runs it outside of the graph"  # type: ignore[attr-defined]
    return function


class OutsideGraphs:
    """Implementations of abstract methods are :func:`not_compiled`: what communicates is part of no graph."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = {name for base in cls.__mro__[1:] for name in getattr(base, "__abstractmethods__", ())}
        for name in declared & vars(cls).keys():
            if isinstance(vars(cls)[name], FunctionType):
                not_compiled(vars(cls)[name])


class Work(OutsideGraphs, abc.ABC):
    """A collective in flight."""

    __slots__ = ()

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns when the result may be used by what this rank runs next.

        Raises:
            OutOfStepError: another rank of the group waits in a different call.
            RankLostError: another rank died.
        """

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once; says so without waiting."""


class WorkThen(Work):
    """A collective in flight, and what this rank does with the result when it has been waited for."""

    __slots__ = ("_after", "_work")

    def __init__(self, work: Work, after: Callable[[], object]) -> None:
        self._work = work
        self._after: Callable[[], object] | None = after

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self) -> None:
        self._work.wait()
        after, self._after = self._after, None  # with the memory that it keeps alive
        if after is not None:
            with torch.no_grad():
                after()


class _Done(Work):
    __slots__ = ()

    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


DONE: Work = _Done()
"""What needs no waiting."""
