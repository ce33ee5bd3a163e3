"""A sequential module whose parts are on several devices and work on micro-batches at the same time.

What flows through it are values, tensors or tuples of them: mini-batches are cut into micro-batches, and put together.
Batch norms may have running statistics of mini-batches, where forward sees micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ConfigurationError, LifecycleError
from ..tracing.ranges import Phase
from ..types import Tree
from ..wrapping.activations import call_checkpointed, is_recomputing, patch_batchnorm


# ------------------------------------------------------------ partitions of consecutive layers, and their errors
class PipeTypeError(ConfigurationError, TypeError):
    """Something is of a kind that a pipeline can't take."""


class BalanceError(ConfigurationError):
    """The numbers of layers in the partitions don't fit the module."""


class TooFewDevicesError(ConfigurationError, IndexError):
    """There are more partitions than devices or ranks to hold them."""


ADVICE = (
    "; while a model still changes, shardkit.nn.pipe.balance finds numbers of layers that take about the same time: "
    "balance_by_time(partitions, model, sample)"
)


def verify_module(module: nn.Module) -> None:
    """Refuses all but sequential modules with distinct layers.

    Raises:
        PipeTypeError: (a TypeError) it is not sequential.
        ConfigurationError: (a ValueError) a layer is in it twice.
    """
    if not isinstance(module, nn.Sequential):
        raise PipeTypeError(
            f"module must be nn.Sequential to be partitioned, and is a {type(module).__name__}"
        )
    verify_distinct(module)


def verify_distinct(layers: Iterable[object]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    ids = [id(layer) for layer in layers]
    if len(set(ids)) != len(ids):
        raise ConfigurationError(
            "module with duplicate children is not supported; make a layer for each place"
        )


def check_balance(layers: int, balance: Sequence[int], places: int, what: str) -> None:
    """Compares numbers of layers in the partitions with how many layers and places (devices, ranks) there are.

    Raises:
        BalanceError: (a ValueError) they are not positive or don't add up.
        TooFewDevicesError: (an IndexError) more partitions than places.
    """
    if sum(balance) != layers:
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {layers}, sum of balance: {sum(balance)}){ADVICE}"
        )
    if any(number <= 0 for number in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {list(balance)}){ADVICE}")
    if len(balance) > places:
        raise TooFewDevicesError(
            f"too few {what} to hold given partitions ({what}: {places}, partitions: {len(balance)})"
        )


def check_checkpoint(checkpoint: str, chunks: int) -> None:
    """Raises ConfigurationError (a ValueError) for a mode or a number of micro-batches that there isn't."""
    if chunks <= 0:
        raise ConfigurationError(f"number of chunks must be positive integer, and is {chunks}")
    if checkpoint not in ("always", "except_last", "never"):
        raise ConfigurationError(
            f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}"
        )


def split_module(module: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """Returns partitions of that many layers each, which keep the names they have in the module."""
    named = iter(module.named_children())
    return [nn.Sequential(OrderedDict(itertools.islice(named, number))) for number in balance]


def verify_shared_parameters(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Refuses a parameter of two partitions: it can be on one device only.

    Raises:
        ConfigurationError: (a ValueError) they are on different ones.
    """
    place: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for name, parameter in partition.named_parameters():
            if place.setdefault(id(parameter), device) != device:
                raise ConfigurationError(
                    "module with duplicate parameters on distinct devices is not supported: "
                    f"{name} {tuple(parameter.shape)} is on {place[id(parameter)]} and on {device}; "
                    "put the layers that share it into one partition"
                )


# ------------------------------------------------------------ micro-batches
Value = torch.Tensor | tuple[torch.Tensor, ...]


def in_tuple(value: Value) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def check(input: object) -> None:
    """Refuses what is neither a tensor nor a tuple of tensors.

    Raises:
        PipeTypeError: (a TypeError) names the type found.
    """
    if isinstance(input, tuple):
        for item in input:
            check(item)
    elif not isinstance(input, torch.Tensor):
        raise PipeTypeError(
            f"expected Tensor, but got {type(input).__name__}: a tensor or a tuple of tensors goes into a pipeline, "
            "from stage to stage and out of it"
        )


def split(value: Value, chunks: int) -> list[Value]:
    """Returns micro-batches along the first dimension, as ``torch.chunk`` cuts it: fewer than asked for if it is short.

    Raises:
        ConfigurationError: tensors of a tuple give different numbers of micro-batches, or there are none.
    """
    if isinstance(value, torch.Tensor):
        return list(value.chunk(chunks))
    pieces = [tensor.chunk(chunks) for tensor in value]
    if not pieces or any(len(p) != len(pieces[0]) for p in pieces):
        raise ConfigurationError(
            f"tensors of sizes {[tuple(t.shape) for t in value]} can't be cut into the same {chunks} micro-batches; "
            "give them one size in their first dimension"
        )
    return list(zip(*pieces, strict=True))


def join(values: list[Value]) -> Value:
    """Returns the mini-batch that these micro-batches are parts of."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)  # type: ignore[arg-type]
    return tuple(torch.cat(pieces) for pieces in zip(*values, strict=True))


class Batch:
    """A tensor or a tuple of tensors (one micro-batch), as a sequence of tensors either way.

    Attributes:
        value: the tensor or tensors.
        atomic: whether it is a single tensor.
    """

    def __init__(self, value: Value, index: int) -> None:
        self.value = value
        self.atomic = isinstance(value, torch.Tensor)
        self._index = index

    tensor_or_tensors = property(attrgetter("value"))
    index = property(attrgetter("_index"))  # which micro-batch it is

    @property
    def tensor(self) -> torch.Tensor:
        """Returns the tensor. Raises AttributeError if this is a tuple."""
        if not self.atomic:
            raise AttributeError("not atomic batch")
        return cast(torch.Tensor, self.value)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors. Raises AttributeError if this is a single one."""
        if self.atomic:
            raise AttributeError("batch is atomic")
        return cast(tuple[torch.Tensor, ...], self.value)

    def call(self, function: Callable[[Value], Value]) -> Batch:
        """Returns a batch of what the function makes of the tensor or tensors."""
        return Batch(function(self.value), self.index)

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(in_tuple(self.value))

    def __len__(self) -> int:
        return len(in_tuple(self.value))

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")
        return in_tuple(self.value)[index]

    def __setitem__(self, index: int | slice, value: Value) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError("only slice [:] supported")
            if self.atomic and len(value) != 1:
                raise IndexError("atomic batch cannot be replaced with multiple tensors")
            self.value = value[0] if self.atomic else cast(tuple[torch.Tensor, ...], value)
            return
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")
        listed = list(self)
        listed[index] = cast(torch.Tensor, value)
        self.value = listed[0] if self.atomic else tuple(listed)


# ------------------------------------------------------------ batch norms
# [Note: deferred statistics] Values are normalized with the statistics of their micro-batch. The running statistics are
# updated once a mini-batch, from sums over all its micro-batches, which the buffers ``sum`` and ``sum_squares``
# collect. As torch's they take the unbiased variance (fairscale's take the biased one).
TModule = TypeVar("TModule", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that waits for ``chunks`` micro-batches before it updates its running statistics.

    Args:
        num_features: channels, the second dimension of inputs [batch, channels, ...].
        eps, momentum, affine: as of torch's batch norms.
        chunks: micro-batches in a mini-batch.
    """

    sum: torch.Tensor
    sum_squares: torch.Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        mean = cast(torch.Tensor, self.running_mean)
        self.register_buffer("sum", torch.zeros_like(mean))
        self.register_buffer("sum_squares", torch.zeros_like(mean))
        self.counter = 0  # values of a channel in the sums
        self.tracked = 0  # micro-batches in the sums
        self.chunks = chunks

    @torch.no_grad()
    def _track(self, input: torch.Tensor) -> None:
        over = [d for d in range(input.dim()) if d != 1]
        values = input.to(self.sum.dtype)
        self.sum += values.sum(over)
        self.sum_squares += values.square().sum(over)
        self.counter += input.numel() // input.size(1)
        self.tracked += 1

    @torch.no_grad()
    def _commit(self) -> None:
        batches = cast(torch.Tensor, self.num_batches_tracked).add_(1)
        weight = 1.0 / float(batches) if self.momentum is None else self.momentum
        mean = self.sum / self.counter
        variance = (self.sum_squares / self.counter - mean.square()) * (
            self.counter / max(self.counter - 1, 1)
        )
        cast(torch.Tensor, self.running_mean).lerp_(mean, weight)
        cast(torch.Tensor, self.running_var).lerp_(variance, weight)
        self.sum.zero_()
        self.sum_squares.zero_()
        self.counter = self.tracked = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes [batch, channels, ...]; see [Note: deferred statistics]."""
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if not is_recomputing():
            self._track(input)
            if self.tracked >= self.chunks:
                self._commit()
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    @classmethod
    def convert_deferred_batch_norm(cls, module: TModule, chunks: int = 1) -> TModule:
        """Replaces all batch norms within a module that track running statistics; keeps their tensors.

        Returns:
            The module, or what takes its place if it is a batch norm itself.
        """

        def make(old: _BatchNorm) -> _BatchNorm:
            if not old.track_running_stats or (isinstance(old, DeferredBatchNorm) and old.chunks == chunks):
                return old
            made = cls(old.num_features, old.eps, old.momentum, old.affine, chunks)
            mean = cast(torch.Tensor, old.running_mean)
            return made.to(mean.device, mean.dtype)

        return cast(TModule, replace_batch_norms(module, make))


def replace_batch_norms(module: nn.Module, make: Callable[[_BatchNorm], _BatchNorm]) -> nn.Module:
    """Puts what ``make`` returns in the place of each batch norm within a module, with its tensors.

    Returns:
        The module, or what takes its place if it is a batch norm itself.
    """
    made: dict[nn.Module | None, _BatchNorm] = {}
    for old in module.modules():
        if isinstance(old, _BatchNorm):
            new = made[old] = make(old)
            new._parameters.update(old._parameters)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                new._buffers[name] = old._buffers[name]
            new.train(old.training)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():  # a layer may have two names
            parent._modules[name] = made.get(child, child)
    return made.get(module, module)


def expect_micro_batches(module: nn.Module, number: int) -> None:
    """Tells all deferred batch norms within a module how many micro-batches come: a short mini-batch gives fewer."""
    for child in module.modules():
        if isinstance(child, DeferredBatchNorm):
            child.chunks = number


# ------------------------------------------------------------ skip connections
# Skip connections between layers of a ``nn.Sequential``, by name: one layer stashes a tensor, a later one pops it.
#
# In a pipeline a stashed tensor goes from the stage that stashes it right to the stage that pops it: it is one more
# result of the one and one more argument of the other ([Note: skip connections]), so that autograd and checkpointing
# need no special case. Without a pipeline it waits in a dictionary of the thread.
#
# From torchgpipe (Kim et al. 2020, arXiv 2004.09910), section 3.3, by way of fairscale.
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


# ------------------------------------------------------------ the pipeline
# A sequential module whose parts are on several devices and work on micro-batches at the same time.
Device = torch.device | int | str
MOVING_DENIED = PipeTypeError(
    "denied to move parameters and buffers, because Pipe should manage device placement; pass devices=[...] to Pipe"
)


class Pipe(nn.Module):
    """GPipe (Huang et al. 2019, arXiv 1811.06965): pipeline parallelism with checkpointing, in one process::

        model = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        output = model(input)

    Losses and gradients are those of the plain module; so are running statistics, with ``chunks=1`` or
    ``deferred_batch_norm``. Outputs are on ``devices[-1]``.

    Args:
        module: it is moved to the devices part by part; names in state dicts are ``partitions.<n>.<name>``.
        balance: number of layers in each partition.
        devices: of the partitions; default: all of the accelerator. One may be named several times.
        chunks: micro-batches that a mini-batch is cut into along its first dimension.
        checkpoint: which micro-batches keep only their inputs and compute activations again in backward: "always",
            "except_last" (backward begins with it right away) or "never". Random layers draw the same numbers, and
            batch norms update their statistics once.
        deferred_batch_norm: running statistics of mini-batches, not of micro-batches.

    Raises:
        PipeTypeError: (a TypeError) the module is not sequential, or its skip connections don't match.
        ConfigurationError: (a ValueError) wrong numbers or names.
        TooFewDevicesError: (an IndexError) fewer devices than partitions.
    """

    balance: list[int] = []  # noqa: RUF012  # fairscale's class attributes
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise BalanceError(f"balance is required: the number of layers in each partition{ADVICE}")
        check_checkpoint(self.checkpoint, self.chunks)
        verify_module(module)
        verify_skippables(module)
        self.balance = list(balance)
        if devices is None and (kind := torch.accelerator.current_accelerator(check_available=True)):
            devices = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
        self.devices = [torch.device(d) for d in devices or ()]
        check_balance(len(module), self.balance, len(self.devices), "devices")
        del self.devices[len(self.balance) :]
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        partitions = split_module(module, self.balance)
        verify_shared_parameters(partitions, self.devices)
        for partition, device in zip(partitions, self.devices, strict=True):
            partition.to(device)
            if self.checkpoint != "never":
                patch_batchnorm(partition)
        self.partitions = nn.ModuleList(partitions)
        self._arriving = arriving_keys(partitions)

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition  # type: ignore[misc]

    def cuda(self, device: Device | None = None) -> Pipe:
        """Refuses: partitions stay where they are. Raises PipeTypeError (a TypeError)."""
        raise MOVING_DENIED

    def cpu(self) -> Pipe:
        """Refuses, as :meth:`cuda`."""
        raise MOVING_DENIED

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Changes the dtype; to another device is refused, as :meth:`cuda`."""
        where = (torch.device, int, str, torch.Tensor)
        if kwargs.keys() & {"device", "tensor"} or (args and isinstance(args[0], where)):
            raise MOVING_DENIED
        return super().to(*args, **kwargs)

    def forward(self, input: Value) -> Value:
        """Returns the sequential module's output.

        Args:
            input: a tensor or a tuple of tensors, with one size in the first dimension. So is what goes from
                partition to partition.

        Raises:
            PipeTypeError: (a TypeError) something else.
        """
        check(input)
        if not self.devices:  # an empty module
            return input
        values = split(input, self.chunks)
        expect_micro_batches(self, len(values))
        return join(self._run(values))

    def _run(self, values: list[Value]) -> list[Value]:
        """Returns micro-batches after the last partition, on its device; see [Note: cells in clock order]."""
        skips: list[Skips] = [{} for _ in values]
        # As fairscale's: the first partition says whether the module is in training mode.
        training = self.partitions[0].training
        stop = checkpointed_cells(self.checkpoint, len(values)) if training else 0
        for tick in ticks(len(values), len(self.partitions)):
            # Copies first: behind a cell of this tick they would wait for it.
            arrived = [self._fetch(i, j, values, skips) for i, j in tick]
            # A cell on the host keeps this thread busy: others are launched before.
            for (i, j), came in sorted(
                zip(tick, arrived, strict=True), key=lambda c: self.devices[c[0][1]].type == "cpu"
            ):
                values[i], left = run_cell(
                    self.partitions[j], values[i], came, f"chunk{i}-part{j}", checkpoint=i < stop
                )
                skips[i].update(left)
        return values

    def _fetch(self, i: int, j: int, values: list[Value], skips: list[Skips]) -> Skips:
        """Brings a micro-batch to a partition's device, and the skip tensors popped there, which are returned."""
        device = self.devices[j]
        values[i] = move(values[i], device)
        came = {key: skips[i].pop(key) for key in self._arriving[j]}
        return {key: None if t is None else move(t, device) for key, t in came.items()}  # type: ignore[misc]


# ------------------------------------------------------------ the schedule: GPipe's order
# [Note: cells in clock order] Cell (i, j) is micro-batch i in partition j. At tick k run the cells with i + j = k,
# which don't depend on each other::
#
#    tick   cells of 3 micro-batches and 3 partitions
#    0      (0,0)
#    1      (1,0) (0,1)
#    2      (2,0) (1,1) (0,2)
#    3            (2,1) (1,2)
#    4                  (2,2)
#
# One thread issues them all. Where kernels are launched and not waited for, devices work on their cells of a tick at
# the same time; on the host nothing would overlap in threads either. Autograd takes what is ready latest first, so
# backward runs the ticks in reverse, without any order of its own having to be written into the graph.
#
# [Note: skip connections] A cell is a function of a micro-batch and the skip tensors that its partition pops from
# earlier ones; it returns the micro-batch and what it has stashed and not popped. So skip tensors are arguments and
# results, move from device to device as the micro-batch does, and their gradients go the reverse way.
def ticks(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of cells (micro-batch, partition) that run at the same time, of m micro-batches and n partitions."""
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k + 1 - m), min(k + 1, n))]


def checkpointed_cells(checkpoint: str, micro_batches: int) -> int:
    """Returns how many of the micro-batches, counted from the first, keep no activations."""
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint]


def run_cell(
    layers: nn.Module, value: Value, skips: Skips, label: str, *, checkpoint: bool
) -> tuple[Value, Skips]:
    """Sends a micro-batch through a partition; returns it with the skip tensors that later partitions pop."""

    def call(value: Value, skips: Skips) -> tuple[Value, Skips]:
        with holding(dict(skips)) as held, Phase(f"shardkit::{label}"):
            output = layers(value)
        check(output)
        return output, held

    if not checkpoint:
        return call(value, skips)
    return call_checkpointed(call, (value, skips), {}, near=layers)  # type: ignore[no-any-return]


def move(value: Value, device: torch.device) -> Value:
    """Moves to another device, differentiably; the copy is not waited for."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type != "cpu")
    return tuple(t.to(device, non_blocking=device.type != "cpu") for t in value)
