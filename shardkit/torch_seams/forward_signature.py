"""``forward`` of a wrapper, with the signature of what it wraps.

Trainers read it: transformers' drops the columns of a data set that a model's forward has no parameter for.
"""

from __future__ import annotations

import functools
import inspect
from typing import TypeVar, cast

from ..types import AnyCallable, Tree

F = TypeVar("F", bound=AnyCallable)


def signed_as_wrapped(forward: F) -> F:
    """Decorates a wrapper's ``forward(self, *args, **kwargs)``; the wrapped module is its attribute ``module``."""
    return cast(F, _Forward(forward))


class _Forward:
    """A method; functions can't have another signature for each object."""

    def __init__(self, function: AnyCallable) -> None:
        self._function = self.__wrapped__ = function
        self.__doc__ = function.__doc__

    def __get__(self, wrapper: object, owner: type | None = None) -> AnyCallable:
        return self._function if wrapper is None else _Bound(self._function, wrapper)


class _Bound(functools.partial[Tree]):
    """The method of one wrapper. Calling it adds no call of Python's."""

    __name__ = "forward"

    @property
    def __self__(self) -> object:
        return self.args[0]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].module.forward)
