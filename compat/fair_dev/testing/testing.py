"""fairscale.fair_dev.testing.testing: the helpers that code outside of fairscale's own tests uses."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "DummyProcessGroup",
    "check_same_model_params",
    "dist_init",
    "in_temporary_directory",
    "objects_are_equal",
    "rmf",
    "set_random_seed",
    "state_dict_norm",
    "teardown",
    "temp_files_ctx",
]


class DummyProcessGroup:
    """A process group in name only: a rank and a size, for what needs no communication."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The world size."""
        return self._size


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


@contextlib.contextmanager
def in_temporary_directory() -> Iterator[str]:
    """A temporary directory as working directory; deleted afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield directory
        finally:
            os.chdir(before)


def set_random_seed(seed: int, model_parallel: bool = True) -> None:
    """Seeds Python's and torch's generators. ``model_parallel`` is accepted as in fairscale."""
    random.seed(seed)
    torch.manual_seed(seed)


def objects_are_equal(a: Any, b: Any, raise_exception: bool = False) -> bool:
    """Whether nested containers hold equal values and close tensors of equal dtype.

    Raises:
        AssertionError: they don't, and ``raise_exception`` is set.
    """
    if type(a) is type(b):
        if isinstance(a, dict):
            same = a.keys() == b.keys() and all(objects_are_equal(a[k], b[k], raise_exception) for k in a)
        elif isinstance(a, (list, tuple)):
            pairs = zip(a, b, strict=False)
            same = len(a) == len(b) and all(objects_are_equal(x, y, raise_exception) for x, y in pairs)
        elif isinstance(a, torch.Tensor):
            same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            same = same and torch.allclose(a.double(), b.double(), rtol=1.3e-6, atol=1e-5)
        else:
            same = bool(a == b)
    else:
        same = False
    if raise_exception and not same:
        raise AssertionError(f"{a!r} differs from {b!r}")
    return same


def check_same_model_params(model_a: nn.Module, model_b: nn.Module, message: str = "") -> None:
    """Raises AssertionError unless parameters and buffers are close."""
    ours, theirs = ([*m.parameters(), *m.buffers()] for m in (model_a, model_b))
    for a, b in zip(ours, theirs, strict=True):
        if not torch.allclose(a, b, atol=1e-3):
            raise AssertionError(f"models differ: {a} and {b}\n{message}")


def state_dict_norm(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the norms of a state dict's tensors, [1]."""
    return torch.stack([v.float().norm() for v in state.values()]).sum().reshape(1)
