"""Every error shardkit raises on purpose.

Messages say which rank, what was expected, what was found and what to change. What is wrong on one
rank is raised on every rank of the group, so that no rank is left waiting for another.

fairscale asserts what it checks of arguments and of the order of calls: what says so here is an AssertionError too, and
``except AssertionError`` of existing code goes on working.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from operator import index
from types import UnionType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from .progress import note_error

if TYPE_CHECKING:
    from .types import AnyCallable, Tree

_F = TypeVar("_F", bound="AnyCallable")
P = ParamSpec("P")
R = TypeVar("R")


class ShardkitError(RuntimeError):
    """Base of all errors of this library.

    Other ranks that wait for one that has raised it, and does not go on, hear of it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        note_error(self)


class ConfigurationError(ShardkitError, ValueError, AssertionError):
    """An argument or a combination of arguments can't work; nothing was changed."""


class BackendError(ShardkitError):
    """A backend is unknown, not installed, or can't serve what was asked of it."""


class RankMismatchError(ShardkitError):
    """Ranks disagree on something that has to be the same everywhere (parameters, world size)."""


class OutOfStepError(ShardkitError):
    """Ranks entered different collectives; the message names the call of each."""


class RankLostError(ShardkitError):
    """Another rank died or closed its connections in the middle of a collective."""


# What a rank raises when another one failed first.
CONSEQUENCES = tuple(
    f"{name}Error"
    for name in ("RankLost", "RankFailed", "OutOfStep", "DistNetwork", "DistBackend", "DistStore")
)


class RankFailedError(ShardkitError):
    """A rank started by :func:`shardkit.launch` raised, or one that weights are exported with; holds its traceback.

    Attributes:
        rank: the rank that failed first.
        remote_type: name of the exception's class in that rank.
        remote_traceback: its formatted traceback.
    """

    def __init__(self, rank: int, remote_type: str, remote_traceback: str) -> None:
        super().__init__(f"rank {rank} failed with {remote_type}:\n\n{remote_traceback}")
        self.rank = rank
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.rank, self.remote_type, self.remote_traceback)


class LifecycleError(ShardkitError, AssertionError):
    """A call came at a moment where it has no meaning (a step before the backward has finished)."""


class RedirectedError(ConfigurationError, NotImplementedError):
    """A name of fairscale's, or an argument that torch refuses so, that is there only to say what takes its place."""


class UntrustedFileError(ShardkitError):
    """A file holds more than data, so that reading it would run code of whoever wrote it."""


class DamagedFileError(ShardkitError):
    """A file is truncated, or has other bytes than were written."""


class FileNotWrittenError(ShardkitError, OSError):
    """A file could not be written; what was there before is whole.

    Attributes:
        errno: the system's number of the cause, as of any OSError.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CheckpointError(ShardkitError):
    """A checkpoint was not saved or not restored, on any rank; those that were there before are whole."""


def without_arguments(**gone: str) -> Callable[[_F], _F]:
    """Decorates a callable: these keyword arguments, which fairscale had once, are refused with what to do instead.

    Its signature stays as it is. An argument that is passed as None or False is dropped silently: it asked for nothing.

    Raises:
        RedirectedError: one of them is passed.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> Tree:
            for name in gone.keys() & kwargs.keys():
                if kwargs.pop(name):
                    raise RedirectedError(f"{name}= is gone since fairscale 0.4.11: {gone[name]}")
            return function(*args, **kwargs)

        return cast(_F, checked)

    return decorate


def noting_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates what all ranks call together: an error that leaves it is noted, of whatever kind it is."""

    @functools.wraps(method)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            note_error(error)
            raise

    return noted


def check_kinds(given: Tree, **kinds: type | UnionType) -> None:
    """Raises ConfigurationError where one of these, None aside, is of another kind; makes numpy's integers Python's."""
    for name, kind in kinds.items():
        if not isinstance(value := given.get(name), int | float | None) and isinstance(0, kind):
            with contextlib.suppress(TypeError):  # it is no whole number
                value = given[name] = index(value)  # numpy's becomes Python's
        if value is not None and not isinstance(value, kind):
            wanted = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigurationError(f"{name} is {value!r} ({type(value).__name__}); it takes {wanted}")
