"""CUDA devices: NCCL groups, and gloo groups that carry CUDA tensors."""

from __future__ import annotations

from typing import ClassVar

from .accelerator import AcceleratorBackend
from .c10d.nccl import NcclGroup


class CudaBackend(AcceleratorBackend):
    """CUDA tensors, one process a rank."""

    name = "cuda"
    device_type = "cuda"
    process_group_backend = "cpu:gloo,cuda:nccl"  # torch saves checkpoints in the background over gloo
    group_types: ClassVar = {"nccl": NcclGroup}
