"""CUDA devices: NCCL groups, and gloo groups that carry CUDA tensors."""

from __future__ import annotations

import torch

from .accelerator import AcceleratorBackend, DeviceModule
from .c10d.group import C10dGroup
from .c10d.nccl import NcclGroup


class CudaBackend(AcceleratorBackend):
    """CUDA tensors, one process a rank."""

    name = "cuda"
    device_type = "cuda"
    process_group_backend = "cpu:gloo,cuda:nccl"  # torch saves checkpoints in the background over gloo
    advice = "this torch was built without CUDA, or no device is visible"

    @property
    def _module(self) -> DeviceModule:
        return torch.get_device_module(self.device_type)  # type: ignore[return-value]

    def _group_type(self, serves: str) -> type[C10dGroup]:
        return NcclGroup if serves == "nccl" else C10dGroup
