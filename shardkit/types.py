"""Names for what is open by its nature. Where nothing is asked of a value its type is ``object``, not one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch.autograd.function import FunctionCtx
from torch.nn.modules.module import _IncompatibleKeys

T = TypeVar("T")  # of a function that hands a value on, or calls another one

StateDict: TypeAlias = dict[str, Any]
"""State of a module, of an optimizer, or of one of its parameters, and what else is saved by name."""

SavedState: TypeAlias = Mapping[str, Any]
"""The same where it is only read."""

ParamGroup: TypeAlias = dict[str, Any]
"""A param group of torch's optimizers: "params" and options."""

Args: TypeAlias = tuple[Any, ...]
"""Positional arguments that are passed on."""

Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments that are passed on, and attributes of an object."""

Memo: TypeAlias = dict[int, Any]
"""Copies that ``copy.deepcopy`` has made so far, by id."""

AnyCallable: TypeAlias = Callable[..., Any]
"""A user's function, or one of torch's, that is called with arguments that are passed on."""

Tree: TypeAlias = Any
"""Values that modules and functions of torch take and return: tensors, or containers of them and of other values."""

Framework: TypeAlias = Any
"""An object of a framework that need not be installed."""

IncompatibleKeys: TypeAlias = _IncompatibleKeys
"""The result of loading a module's state."""

ProcessGroup: TypeAlias = object
"""Argument of ``Backend.group``: a Group, a process group of torch's, one with ``rank()`` and ``size()``, or None."""

Facts: TypeAlias = Sequence[tuple[str, object]]
"""A term that ranks have to agree on: (what it is, its value)."""


class Timer(Protocol):
    """Times on a device's stream."""

    def mark(self) -> object:
        """Notes when the device comes to where its current stream is now."""

    def seconds(self, first: object, second: object) -> float:
        """Measures what is between two marks that the device has passed."""


class Context(FunctionCtx):
    """The ``ctx`` of an autograd function. Subclasses name what a function keeps for its backward."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
