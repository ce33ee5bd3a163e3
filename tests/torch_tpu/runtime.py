"""Makes a process one in which torch_tpu has found a TPU; it is the CPU. Nothing is asked of a TPU or of a network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from shardkit.backends.tpu import ADDRESSES, TOPOLOGY
from tests.late_device.build import compiled
from tests.late_device.build import missing as obstacle

DEVICES = 4
PLUGIN = "SHARDKIT_PJRT_CPU"


def plugin() -> Path | None:
    """XLA's PJRT plugin for CPUs."""
    given = os.environ.get(PLUGIN)
    return Path(given) if given else None


def missing() -> str:
    """What torch_tpu can't be run for; empty: nothing."""
    if importlib.util.find_spec("torch_tpu") is None:
        return "torch_tpu is not installed (make torch-tpu)"
    if plugin() is None:
        return f"there is no PJRT plugin for CPUs: {PLUGIN} names none"
    return obstacle()


def host_group() -> tuple[str, Path]:
    """The name and place of the process groups that several ranks have."""
    name = "shardkit_host_group"
    return name, compiled(Path(__file__).with_name("host_group.cpp"), name)


def variables() -> dict[str, str]:
    """What processes need before they import torch."""
    host_group()  # here: ranks have a limit for their start
    one = compiled(Path(__file__).with_name("one_device.c"), "shardkit_one_device")
    return {
        "TPU_LIBRARY_PATH": str(one), PLUGIN: str(plugin()), "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": "",
        "TF_CPP_MIN_LOG_LEVEL": "3", TOPOLOGY: "1,1,1", ADDRESSES: "localhost:8070",
    }  # fmt: skip


def begin() -> Any:
    """What importing torch does on a machine with TPUs; :func:`variables` were set before.

    Returns:
        ``torch.tpu``
    """
    import torch
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: DEVICES
    _loader._init_device("tpu")
    return torch.get_device_module("tpu")
