"""fairscale.nn.pipe.pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline import partition
from shardkit.pipeline.pipe import Device

__getattr__ = redirected_names(__name__)

Devices = Iterable[Device] | list[Device]
Module = nn.Module


def recommend_auto_balance(message: str) -> str:
    """The message, and how to have the numbers of layers found."""
    return message + partition.ADVICE


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: list[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Partitions, moved to their devices, with the numbers of layers and the devices (superfluous ones are removed).

    Raises:
        BalanceError: (a ValueError) the numbers don't fit.
        TooFewDevicesError: (an IndexError) fewer devices than partitions.
    """
    balance = list(balance)
    partition.check_balance(len(module), balance, len(devices), "devices")
    del devices[len(balance) :]
    parts = partition.split_module(module, balance)
    return nn.ModuleList(p.to(d) for p, d in zip(parts, devices, strict=True)), balance, devices


def verify_splitting(
    module: nn.Sequential,
    partitions: Sequence[nn.Sequential],
    balance: Iterable[int],
    devices: list[torch.device],
) -> None:
    """Raises ConfigurationError (a ValueError) for a parameter on two devices."""
    partition.verify_shared_parameters(partitions, devices)
