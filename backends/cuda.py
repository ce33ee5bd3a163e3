"""CUDA devices: NCCL groups, and gloo groups that carry CUDA tensors."""

from __future__ import annotations

from .accelerator import AcceleratorBackend
from .c10d.nccl import NcclGroup


class CudaBackend(AcceleratorBackend):
    """CUDA tensors, one process a rank."""

    name = "cuda"
    device_type = "cuda"
    process_group_backend = "nccl"
    group_types = {"nccl": NcclGroup}  # noqa: RUF012
