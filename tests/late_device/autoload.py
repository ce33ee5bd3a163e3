"""What ``import torch`` calls on a machine that has the device: with tests/late_device/machine on Python's path."""

from __future__ import annotations


def load() -> None:
    from .device import DEVICES, register

    register("late", DEVICES)
