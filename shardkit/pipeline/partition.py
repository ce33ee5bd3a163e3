"""Cuts a sequential module into partitions of consecutive layers; and the errors of pipelines."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..errors import ConfigurationError


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


def require_balance(balance: object) -> None:
    """Raises BalanceError (a ValueError) where none is given."""
    if balance is None:
        raise BalanceError(f"balance is required: the number of layers in each partition{ADVICE}")


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
