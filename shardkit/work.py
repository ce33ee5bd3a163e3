"""What collectives are: how contributions are combined, and what is in flight."""

from __future__ import annotations

import abc
import enum


class ReduceOp(enum.Enum):
    """How contributions of ranks are combined. AVG (of real or complex numbers) divides the sum by the world size."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"


class Work(abc.ABC):
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


class _Done(Work):
    __slots__ = ()

    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


DONE: Work = _Done()
"""What needs no waiting."""
