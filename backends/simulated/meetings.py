"""What ranks wait for: collectives that not all members have reached, and anything else that another rank brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

import torch

from shardkit.errors import BackendError, OutOfStepError, ShardkitError
from shardkit.types import Tree

from ..diagnosis.calls import Call
from ..diagnosis.watch import OUT_OF_STEP_HINT
from .places import Place

Finish = Callable[[list[Tree]], object]  # what is done with all that ranks brought


class Awaited(Protocol):
    """What a rank can wait for.

    Attributes:
        error: why it can't come any more: an exception's class and message.
    """

    error: tuple[type[ShardkitError], str] | None

    @property
    def over(self) -> bool:
        """It came to its end, good or bad."""

    def fail(self, what: str) -> None:
        """Nobody will bring it."""

    def release(self) -> bool:
        """No rank can go on: whether this one may, without it."""


class Condition:
    """Something that another rank makes true.

    Args:
        optional: who waits for it goes on when no rank could otherwise.

    Attributes:
        released: it went on so.
    """

    def __init__(self, holds: Callable[[], bool], optional: bool = False) -> None:
        self.error: tuple[type[ShardkitError], str] | None = None
        self.released = False
        self._holds, self._optional = holds, optional

    @property
    def over(self) -> bool:
        return self.released or self.error is not None or self._holds()

    def release(self) -> bool:
        self.released = self.released or self._optional
        return self.released

    def fail(self, what: str) -> None:
        self.error = OutOfStepError, f"ranks are out of step: {what}. {OUT_OF_STEP_HINT}"


class Meeting:
    """One collective, from the first rank that arrives to the last.

    Args:
        ranks: global rank of each member, in group order.

    Attributes:
        done: all have arrived, and the result is there.
        error: why it can't be done any more: an exception's class and message.
        given_up: how often each rank that has arrived had given up before.
        result: what ``finish`` returned on the last rank to arrive.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.result: object = None
        self.error: tuple[type[ShardkitError], str] | None = None
        self.done = False
        self.given_up: dict[int, int] = {}
        self._calls: dict[int, Call] = {}  # by global rank
        self._places: dict[int, Place] = {}
        self._terms: dict[int, tuple[object, ...]] = {}
        self._brought: dict[int, Tree] = {}

    @property
    def over(self) -> bool:
        """It came to its end, good or bad."""
        return self.done or self.error is not None

    def release(self) -> bool:
        return False

    def missing(self) -> set[int]:
        return set(self.ranks) - self._calls.keys()

    def describe(self, rank: int) -> str:
        """The call of a rank that has arrived, and its line."""
        return f"{self._calls[rank].describe()} at {self._places[rank]}"

    def first(self) -> int:
        """The rank that came first."""
        return next(iter(self._calls))

    def arrive(
        self, rank: int, call: Call, place: Place, terms: tuple[object, ...], brought: Tree, finish: Finish
    ) -> None:
        """``rank`` is here; the last one does the work for all.

        Args:
            terms: what has to be equal on all ranks.
            brought: handed to ``finish`` as a list in group order.
        """
        self._calls[rank], self._terms[rank], self._places[rank] = call, terms, place
        if self.error is not None:
            return
        other = next((r for r, t in self._terms.items() if t != terms), None)
        if other is not None:
            self.fail(f"{self._beside(other, rank)}; {self._beside(rank, other)}")
            return
        self._brought[rank] = brought
        if self.missing():
            return
        try:
            with torch.no_grad():
                self.result = finish([self._brought[r] for r in self.ranks])
        except OutOfStepError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001 - it is every member's
            self.error = BackendError, f"{call.describe()} failed: {type(error).__name__}: {error}"
        self.done = self.error is None
        self._brought.clear()

    def _beside(self, rank: int, other: int) -> str:
        """A rank's call, and what of its terms differs from another's without being in that sentence."""
        said = f"rank {rank} is in {self.describe(rank)}"
        pairs = zip_longest(self._terms[rank], self._terms[other], fillvalue="")
        differing = [str(mine) for mine, theirs in pairs if mine != theirs and str(mine) not in said]
        return f"{said}, with {', '.join(differing)}" if differing else said

    def fail(self, what: str) -> None:
        self.error = OutOfStepError, f"ranks are out of step: {what}. {OUT_OF_STEP_HINT}"
        self._brought.clear()
