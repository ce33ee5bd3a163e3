"""Skip connections between layers of a ``nn.Sequential``, by name: one layer stashes a tensor, a later one pops it.

In a pipeline a stashed tensor goes from the stage that stashes it right to the stage that pops it: it is one more
result of the one and one more argument of the other ([Note: skip connections]), so that autograd and checkpointing
need no special case. Without a pipeline it waits in a dictionary of the thread.

From torchgpipe (Kim et al. 2020, arXiv 2004.09910), section 3.3, by way of fairscale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from ..errors import LifecycleError
from ..types import Tree
from .microbatch import PipeTypeError, Value


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Keeps skip tensors of the same name apart; see :meth:`Skippable.isolate`."""

    id: uuid.UUID = dataclasses.field(init=False, default_factory=uuid.uuid4)


Key = tuple[Namespace | None, str]
Skips = dict[Key, torch.Tensor | None]


class stash:  # used like a keyword: yield stash("name", tensor)
    """``yield stash(name, tensor)`` hands a tensor (or None) to the layer that pops that name."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """``tensor = yield pop(name)`` takes what an earlier layer stashed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


StashPop = stash | pop


class _Here(threading.local):
    """Holds what this thread has stashed and not popped yet."""

    def __init__(self) -> None:
        self.skips: Skips = {}


_here = _Here()


@contextlib.contextmanager
def holding(skips: Skips) -> Iterator[Skips]:
    """Lets layers, within this block, pop from these skips and stash into them."""
    before, _here.skips = _here.skips, skips
    try:
        yield skips
    finally:
        _here.skips = before


class Skippable(nn.Module):
    """A layer with skip connections; made by :func:`skippable`.

    Attributes:
        module: the layer itself, whose forward may be a generator that yields ``stash`` and ``pop``.
        namespaces: namespace of each isolated name.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Tree, **kwargs: Tree) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """Returns the name with its namespace (None: the common one)."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterable[Key]:
        """Returns names of what this layer stashes."""
        return [self.namespaced(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> Iterable[Key]:
        """Returns names of what this layer pops."""
        return [self.namespaced(name) for name in sorted(self.poppable_names)]

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Puts this layer's names into a namespace, so that other layers may use the same ones.

        Args:
            ns: the layer at the other end is isolated with it as well.
            only: these names; default: all.

        Returns:
            This layer.
        """
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def dispatch(
        self,
        input: Value,
        handle_stash: Callable[[str, torch.Tensor | None], None],
        handle_pop: Callable[[str], torch.Tensor | None],
    ) -> Value:
        """Runs the layer and gives what it yields to the handlers.

        Raises:
            PipeTypeError: it yields something else.
        """
        running = self.module(input)
        if not isinstance(running, Generator):
            return running  # type: ignore[no-any-return]  # a forward that yields nothing
        answer = None
        while True:
            try:
                command = running.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = None
            if isinstance(command, stash):
                handle_stash(command.name, command.tensor)
            elif isinstance(command, pop):
                answer = handle_pop(command.name)
            else:
                raise PipeTypeError(
                    f"{command!r} is not a command from @skippable; yield stash(...) or pop(...)"
                )

    def forward(self, input: Value) -> Value:
        """Runs the layer; stashes and pops on the way.

        Raises:
            LifecycleError: (a RuntimeError) a name is popped that nobody stashed, or stashed or popped without being
                declared, or declared and then not stashed or popped.
        """
        held = _here.skips
        keys = {name: (ns, name) for ns, name in self.poppable()}
        missing = [name for name, key in keys.items() if key not in held]
        if missing:
            raise LifecycleError(f"'{missing[0]}' has not been stashed; a layer before {self!r} has to")
        to_pop = {name: held.pop(key) for name, key in keys.items()}
        stashed: dict[str, torch.Tensor | None] = {}

        def handle_stash(name: str, tensor: torch.Tensor | None) -> None:
            if name not in self.stashable_names:
                raise LifecycleError(f"'{name}' has not been declared as stashable by {self!r}")
            stashed[name] = tensor

        def handle_pop(name: str) -> torch.Tensor | None:
            if name not in to_pop:
                problem = "is popped a second time" if name in keys else "has not been declared as poppable"
                raise LifecycleError(f"'{name}' {problem} by {self!r}")
            return to_pop.pop(name)

        output = self.dispatch(input, handle_stash, handle_pop)
        _complain(self.stashable_names - stashed.keys(), "stashed", self)
        _complain(to_pop.keys(), "popped", self)
        held.update({self.namespaced(name): tensor for name, tensor in stashed.items()})
        return output


def _complain(names: Iterable[str], done: str, layer: nn.Module) -> None:
    if listed := ", ".join(f"'{name}'" for name in sorted(names)):
        raise LifecycleError(f"{listed} must be {done} but have not, in {layer!r}")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorates a module class whose forward stashes and pops skip tensors of these names::

        @skippable(stash=["residual"])
        class First(nn.Module):
            def forward(self, input):
                yield stash("residual", input)
                return self.layer(input)

        @skippable(pop=["residual"])
        class Last(nn.Module):
            def forward(self, input):
                return input + (yield pop("residual"))

    Its instances keep the decorated module as ``module``, so that names in state dicts begin with ``module.``.
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        space = {"module_cls": module_cls, "__module__": module_cls.__module__, **names}
        return type(module_cls.__name__, (Skippable,), space)

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that each skip tensor is stashed by one layer and popped by one later layer.

    Raises:
        PipeTypeError: (a TypeError) lists all that is wrong.
    """
    stashed: set[Key] = set()
    popped: set[Key] = set()
    wrong: list[str] = []
    for layer_name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        wrong += [f"'{layer_name}' declared '{n}' both as stashable and as poppable" for n in sorted(both)]
        for key in (k for k in layer.stashable() if k[1] not in both):
            if key in stashed:
                wrong.append(
                    f"'{layer_name}' redeclared '{key[1]}' as stashable but not isolated by namespace"
                )
            stashed.add(key)
        for key in (k for k in layer.poppable() if k[1] not in both):
            if key in popped:
                wrong.append(
                    f"'{layer_name}' redeclared '{key[1]}' as poppable but not isolated by namespace"
                )
            elif key not in stashed:
                wrong.append(f"'{layer_name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                popped.add(key)
    wrong += [f"no module declared '{name}' as poppable but stashed" for _, name in stashed - popped]
    if wrong:
        lines = "\n".join(f"* {line}" for line in wrong)
        raise PipeTypeError(f"one or more pairs of stash and pop do not match:\n\n{lines}")


def arriving_keys(partitions: Iterable[nn.Sequential]) -> list[list[Key]]:
    """Lists for each partition the skip tensors that it pops and an earlier one stashed."""
    arriving = []
    for layers in partitions:
        skippables = [layer for layer in layers if isinstance(layer, Skippable)]
        own = {key for layer in skippables for key in layer.stashable()}
        arriving.append([key for layer in skippables for key in layer.poppable() if key not in own])
    return arriving


class SkipLayout:
    """Routes of skip tensors between partitions.

    Args:
        num_partitions: how many there are.
        skip_routes: namespace (None: the common one) and name -> the partitions that stash and pop it.

    Attributes:
        by_ns_name: the routes given.
        by_partition: for each partition, (where from, namespace, name) of what it pops, in order of partitions
            and names.
        by_src_partition: for each partition, (where to, namespace, name) of what it stashes, in order
            of partitions and names.
    """

    def __init__(self, num_partitions: int, skip_routes: Mapping[Key, tuple[int, int]]) -> None:
        self.by_ns_name = dict(skip_routes)
        self.by_partition: list[list[tuple[int, Namespace | None, str]]] = [[] for _ in range(num_partitions)]
        self.by_src_partition: list[list[tuple[int, Namespace | None, str]]] = [
            [] for _ in range(num_partitions)
        ]
        for (ns, name), (stashing, popping) in skip_routes.items():
            self.by_partition[popping].append((stashing, ns, name))
            self.by_src_partition[stashing].append((popping, ns, name))
        for found in (*self.by_partition, *self.by_src_partition):
            found.sort(key=lambda route: (route[0], route[2]))

    def copy_policy_by_src(self, prev_j: int) -> Iterable[tuple[int, Namespace | None, str]]:
        """Yields (where to, namespace, name) of what a partition stashes and others pop."""
        return (route for route in self.by_src_partition[prev_j] if route[0] != prev_j)

    def copy_policy(self, next_j: int) -> Iterable[tuple[int, Namespace | None, str]]:
        """Yields (where from, namespace, name) of what a partition pops and others stash."""
        return (route for route in self.by_partition[next_j] if route[0] != next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Says whether a skip tensor leaves its partition."""
        stashing, popping = self.by_ns_name.get((ns, name), (-1, -1))
        return stashing != popping


def inspect_skip_layout(partitions: Sequence[nn.Sequential]) -> SkipLayout:
    """Returns the routes of the skip tensors of these partitions' layers."""
    stashed: dict[Key, int] = {}
    routes: dict[Key, tuple[int, int]] = {}
    for k, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                stashed.update(dict.fromkeys(layer.stashable(), k))
                routes.update({key: (stashed.pop(key), k) for key in layer.poppable()})
    return SkipLayout(len(partitions), routes)
