"""Values that flow through a pipeline, tensors or tuples of them; mini-batches cut into micro-batches, and back.

And batch norms whose running statistics are those of mini-batches, where forward sees micro-batches.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ConfigurationError
from ..wrapping.activations import is_recomputing


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
