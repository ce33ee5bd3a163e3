"""What one rank issues within a step, and issuing the rest of it with nothing in it.

[Note: prefix] Ranks issue the same calls in a step, and a rank that has left it owes the others what it has not issued.
Which calls those are, it knows from steps before: as long as what it has issued is how those began, it goes on as they
did. Where other ranks go on otherwise (a model that branches), they are out of step, and all ranks hear of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch

from ..backend import Group, ReduceOp
from ..types import Args, Kwargs, Tree


class Shaped(NamedTuple):
    """What a tensor of a call is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shaped:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


Argument: TypeAlias = "Shaped | tuple[int, ...] | ReduceOp | int | str | None"


class IssuedCall(NamedTuple):
    """A collective, as far as other ranks depend on it.

    Attributes:
        group: in which it was called.
        name: of the group's method.
        arguments: its own, with shapes in place of tensors; None: as if it were not given.
    """

    group: Group
    name: str
    arguments: tuple[Argument, ...]

    def issue_empty(self) -> None:
        """The same call once more, of zeros; returns when it is through."""
        given = [a.zeros() if isinstance(a, Shaped) else a for a in self.arguments]
        count = len(_POSITIONAL[self.name])
        named = {k: v for k, v in zip(_NAMED[self.name], given[count:], strict=True) if v is not None}
        with torch.no_grad():
            getattr(self.group, self.name)(*given[:count], **named)


# Of each method: the arguments that come by position, and those that come by name.
_POSITIONAL = {
    "all_gather_into": ("output", "shard", "sizes"),
    "reduce_scatter_into": ("shard", "input", "sizes"),
    "all_to_all": ("output", "input", "output_sizes", "input_sizes"),
    "all_reduce": ("tensor",),
    "reduce": ("tensor", "dst"),
    "broadcast": ("tensor", "src"),
    "barrier": (),
    "agree": ("what",),
}
_NAMED = {
    name: () if name == "agree" else ("op", "label") if "reduce" in name else ("label",)
    for name in _POSITIONAL
}
# What other ranks would get of these is not known.
_OF_OBJECTS = ("all_gather_bytes", "all_gather_object", "gather_object", "broadcast_object", "new_group")


def _described(group: Group, name: str, args: Args, kwargs: Kwargs) -> IssuedCall:
    given = dict(zip(_POSITIONAL[name], args, strict=False)) | kwargs
    return IssuedCall(group, name, tuple(_plain(given.get(k)) for k in (*_POSITIONAL[name], *_NAMED[name])))


def _plain(argument: Tree) -> Argument:
    if isinstance(argument, torch.Tensor):
        return Shaped.of(argument)
    if argument is None or isinstance(argument, int | str | ReduceOp):
        return argument
    return tuple(int(n) for n in argument)  # sizes


class IssuedCalls:
    """The collectives of a step in the order of their calls, over all groups.

    Attributes:
        calls: those that can be issued again with nothing in them.
        other: the name of one that can't; "" if there was none.
        failed: a call raised, so that nobody knows whether it was issued.
        given_up: groups whose other ranks would have heard that this rank has left the step, and why.
    """

    def __init__(self) -> None:
        self.calls: list[IssuedCall] = []
        self.other = ""
        self.failed = False
        self.given_up: list[tuple[Group, str]] = []
        self._is_inside = False

    @contextlib.contextmanager
    def listening(self, groups: Iterable[Group]) -> Iterator[None]:
        """Inside, calls in these groups and their channels are noted, and nobody hears that this rank gives up."""
        heard = list(dict.fromkeys(g for group in groups for g in (group, *group.channels())))
        try:
            for group in heard:
                own = {name: self._noting(group, name) for name in (*_POSITIONAL, *_OF_OBJECTS)}
                group.__dict__.update(own, abort=functools.partial(self._keep, group))
            yield
        finally:
            for group in heard:
                for name in (*_POSITIONAL, *_OF_OBJECTS, "abort"):
                    group.__dict__.pop(name, None)

    def _keep(self, group: Group, why: str = "the rank gave up") -> None:
        self.given_up.append((group, why))

    def _noting(self, group: Group, name: str) -> Callable[..., Tree]:
        method = getattr(group, name)

        @functools.wraps(method)
        def noted(*args: Tree, **kwargs: Tree) -> Tree:
            if self._is_inside:  # a part of another call
                return method(*args, **kwargs)
            if name in _POSITIONAL:
                self.calls.append(_described(group, name, args, kwargs))
            else:
                self.other = name
            self._is_inside = True
            try:
                return method(*args, **kwargs)
            except BaseException:
                self.failed = True
                raise
            finally:
                self._is_inside = False

        return noted

    def give_up(self) -> None:
        """Other ranks hear what they have not heard."""
        for group, why in self.given_up:
            group.abort(why)

    def rest_of(self, whole: IssuedCalls) -> list[IssuedCall] | None:
        """What is still to come of a step like another one; None if this is none."""
        count = len(self.calls)
        return whole.calls[count:] if self.calls == whole.calls[:count] else None
