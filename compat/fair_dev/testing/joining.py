"""Ranks that meet in a file, and what tests switch for them; to be had from
:mod:`shardkit.fair_dev.testing.testing`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardkit.nn.model_parallel.initialize import destroy_model_parallel


def make_cudnn_deterministic() -> None:
    """cuDNN and matrix products give the same bits each time: no autotuning, no TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def dist_init(rank: int, world_size: int, filename: str, filename_rpc: str = "") -> bool:
    """Joins a process group of ranks on one machine that meet in a file: NCCL where there are GPUs, else gloo.

    Args:
        rank, world_size: this rank and how many there are.
        filename: the file, the same on all ranks.
        filename_rpc: a second one; starts torch.distributed.rpc too.

    Returns:
        False, and nothing was done, if there are GPUs but fewer than ranks.
    """
    accelerators = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    if 0 < accelerators < world_size:
        return False
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["RANK"] = str(rank)
    backend = dist.get_default_backend_for_device("cpu")
    if kind is not None and accelerators:
        torch.accelerator.set_device_index(rank % accelerators)
        backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"file://{filename}")
    if filename_rpc:
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{filename_rpc}")
        rpc.init_rpc(f"Test{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return True


def teardown() -> None:
    """Leaves what :func:`dist_init` joined; harmless if that was nothing."""
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    if dist.rpc.is_available():
        with contextlib.suppress(RuntimeError):  # rpc was not started
            dist.rpc.shutdown(graceful=False)


def rmf(filename: str) -> None:
    """Deletes a file if it exists."""
    Path(filename).unlink(missing_ok=True)


@contextlib.contextmanager
def temp_files_ctx(num: int) -> Iterator[tuple[str, ...]]:
    """That many empty temporary files; deleted afterwards."""
    names = []
    for _ in range(num):
        handle, name = tempfile.mkstemp()
        os.close(handle)
        names.append(name)
    try:
        yield tuple(names)
    finally:
        for name in names:
            rmf(name)
