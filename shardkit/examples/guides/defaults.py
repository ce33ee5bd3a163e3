"""What these scripts have in common."""

from __future__ import annotations

import os

from shardkit.backend import get_backend
from shardkit.examples.images import default_folder

from ...types import Kwargs


def defaults(strategy: str) -> Kwargs:
    """For :func:`shardkit.examples.flags.make_parser`.

    Args:
        strategy: "native" for scripts that reduce gradients, "xla_fsdp" for those that shard.
    """
    return {
        "backend": "xla" if get_backend("xla").is_available() else "gloo",
        "strategy": strategy,
        "batch_size": 128,
        "num_epochs": 18,
        "eval_interval": 1,
    }


def of_mnist(strategy: str) -> Kwargs:
    """Of the scripts for MNIST."""
    return {**defaults(strategy), "lr": 0.01, "momentum": 0.5, "lr_scheduler_type": "none"}


def of_imagenet(strategy: str) -> Kwargs:
    """Of the scripts for ImageNet."""
    return {
        **defaults(strategy), "lr": 0.5, "momentum": 0.9, "model": "resnet50", "test_set_batch_size": 64,
        "lr_scheduler_type": "WarmupAndExponentialDecayScheduler", "auto_wrap_min_num_params": 1_000_000,
    }  # fmt: skip


def checkpoints(name: str) -> str:
    """How paths of checkpoints begin: in /tmp, or TMPDIR."""
    return str(default_folder(name) / "final_ckpt")


def ranks() -> int:
    """As many as torch_xla's replicas on a CPU, or two."""
    return int(os.environ.get("CPU_NUM_DEVICES", "2"))
