"""fairscale.fair_dev.testing.testing: helpers of fairscale's tests, which tests elsewhere use as well."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.nn.model_parallel.initialize import model_parallel_is_initialized
from shardkit.nn.model_parallel.random import model_parallel_cuda_manual_seed
from shardkit.types import Tree

filename_mpi: str | None = None
available_devices = ["cpu", *(str(d) for d in [torch.accelerator.current_accelerator()] if d is not None)]

_redirected = redirected_names(__name__)


def __getattr__(name: str) -> Any:
    """Redirected names, and the marks that skip tests: made when asked for, since all else works without pytest."""
    devices = torch.accelerator.device_count()
    conditions: dict[str, tuple[bool, str]] = {
        "skip_if_cuda": (devices > 0, "runs on the CPU only, to save time"),
        "skip_if_no_cuda": (devices < 1, "needs a GPU"),
        "skip_if_single_gpu": (devices < 2, "needs two GPUs"),
        "skip_if_less_than_four_gpu": (devices < 4, "needs four GPUs"),
        "skip_if_py38": (sys.version_info[:2] == (3, 8), "not for Python 3.8"),
        "skip_if_py39_no_cuda": (devices < 1 and sys.version_info[:2] == (3, 9), "Python 3.9 needs a GPU"),
        "skip_due_to_flakyness": (True, "does not always pass"),
    }
    if name not in conditions:
        return _redirected(name)
    import pytest

    condition, reason = conditions[name]
    return pytest.mark.skipif(condition, reason=reason)


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


def in_circle_ci() -> bool:
    """Whether this runs on CircleCI."""
    return os.path.exists("/home/circleci")


def skip_a_test_if_in_CI() -> None:
    """Skips the calling test on CircleCI."""
    if in_circle_ci():
        import pytest

        pytest.skip("not on CircleCI")


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
    """Seeds the generators of Python, torch, numpy (if it is loaded), and of model parallelism (if it is set up)."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if model_parallel and model_parallel_is_initialized():
        model_parallel_cuda_manual_seed(seed)


def objects_are_equal(
    a: Tree,
    b: Tree,
    raise_exception: bool = False,
    dict_key: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> bool:
    """Whether nested containers hold equal values, and tensors that are close and equal in shape, dtype and device.

    Args:
        a, b: what to compare.
        raise_exception: raise where they differ.
        dict_key: path to show in the error.
        rtol, atol: as of :func:`torch.testing.assert_close`, for all tensors (fairscale: only for outermost ones).

    Raises:
        AssertionError, ValueError: they differ, and ``raise_exception`` is set; ValueError for types, keys, lengths.
    """
    try:
        _compare(a, b, dict_key or "", rtol, atol)
    except (AssertionError, ValueError):
        if raise_exception:
            raise
        return False
    return True


def _compare(a: Tree, b: Tree, path: str, rtol: float | None, atol: float | None) -> None:
    if type(a) is not type(b):
        raise ValueError(f"{path}: {type(a)} and {type(b)}")
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise ValueError(f"{path}: keys {list(a)} and {list(b)}")
        for key in a:
            _compare(a[key], b[key], f"{path}[{key!r}]", rtol, atol)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            raise ValueError(f"{path}: lengths {len(a)} and {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _compare(x, y, f"{path}[{i}]", rtol, atol)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{path}: {text}")
    elif a != b:
        raise AssertionError(f"{path}: {a!r} and {b!r}")


def check_same_model_params(model_a: nn.Module, model_b: nn.Module, message: str = "") -> None:
    """Raises AssertionError unless parameters and buffers are close."""
    ours, theirs = ([*m.parameters(), *m.buffers()] for m in (model_a, model_b))
    for a, b in zip(ours, theirs, strict=True):
        if not torch.allclose(a, b, atol=1e-3):
            raise AssertionError(f"models differ: {a} and {b}\n{message}")


def check_same_models_across_ranks(
    model: nn.Module,
    process_group: dist.ProcessGroup | None,
    params_should_be_equal: bool,
    check_broadcast_buffers: bool,
) -> None:
    """Raises AssertionError on all ranks unless their models agree (collective; fairscale: on rank 0).

    Args:
        model: the module.
        process_group: ranks to compare; None for all.
        params_should_be_equal: False: nothing has to agree, the ranks only meet.
        check_broadcast_buffers: compare buffers, too.
    """
    for tensor in [*model.parameters(), *(model.buffers() if check_broadcast_buffers else ())]:
        tensor = tensor.detach().contiguous()
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(everywhere, tensor, group=process_group)
        if params_should_be_equal and any(not torch.equal(everywhere[0], other) for other in everywhere):
            raise AssertionError(f"models differ between ranks: {everywhere}")


def state_dict_norm(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the norms of a state dict's tensors, [1]."""
    return torch.stack([v.float().norm() for v in state.values()]).sum().reshape(1)


def dump_all_tensors(rank: int) -> None:
    """Prints all tensors that are alive; on rank 0."""
    for x in gc.get_objects() if rank == 0 else ():
        if issubclass(type(x), torch.Tensor):
            print(type(x), x.shape, x.dtype, x.device)
