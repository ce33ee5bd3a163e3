"""What happened on each rank, told to all: an error on one is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .. import errors
from ..checks.facts import all_gather_facts
from ..errors import CheckpointError, FileNotWrittenError, ShardkitError
from ..optimizer_state.leaves import Ranks
from ..types import Tree

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs some work; returns its result, or the error that it raised."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        return None, error


def agree(ranks: Ranks, problem: Exception | None, what: str, fact: object = None) -> list[Tree]:
    """Each rank's fact, on every rank, unless something went wrong on one (collective).

    Args:
        problem: what went wrong on this rank.
        what: was done, for messages: "saving step 17".
        fact: see :func:`all_gather_facts`.

    Raises:
        ShardkitError: on all ranks, the class and message of the first rank with a problem.
    """
    mine = None if problem is None else described(problem)
    if ranks.group is None:
        everybody = [(mine, fact)]
    else:
        control = ranks.group.channel("control")
        everybody = all_gather_facts(control, (mine, fact), label=what)
    for rank, (theirs, _) in zip(ranks.world, everybody, strict=True):
        if theirs is not None:
            raise raised(theirs, what, rank if ranks.size > 1 else None) from problem
    return [found for _, found in everybody]


def described(problem: BaseException) -> tuple[str, str, int | None]:
    """An error as a fact: class, message and the system's number."""
    number = problem.errno if isinstance(problem, OSError) else None
    if isinstance(problem, ShardkitError):
        return type(problem).__name__, str(problem), number
    if isinstance(problem, OSError):
        return FileNotWrittenError.__name__, f"{problem.strerror or problem}: {problem.filename}", number
    return CheckpointError.__name__, f"{type(problem).__name__}: {problem}", None


def raised(fact: tuple[str, str, int | None], what: str, rank: int | None) -> ShardkitError:
    """The error that all ranks raise.

    Args:
        rank: where it happened; None for here.
    """
    name, message, number = fact
    where = "" if rank is None else f" on rank {rank}"
    text = f"{what} failed{where}: {message}"
    kind = getattr(errors, name, CheckpointError)
    if kind is FileNotWrittenError:
        return FileNotWrittenError(text, number)
    try:
        return kind(text)
    except TypeError:  # an error with more arguments
        return CheckpointError(f"{what} failed{where}: {name}: {message}")
