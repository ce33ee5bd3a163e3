"""Ranks that meet in a file, and functions that run on several; parts of :mod:`shardkit.fair_dev.testing.testing`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

from shardkit.errors import ConfigurationError
from shardkit.nn.model_parallel.initialize import destroy_model_parallel, initialize_model_parallel
from shardkit.types import AnyCallable, Args, Tree


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


def get_worker_map() -> dict[int, str]:
    """Rank -> its name for torch.distributed.rpc."""
    return {rank: f"Test{rank}" for rank in range(dist.get_world_size())}


def get_world_sizes() -> list[int]:
    """1, 2, 4 and 8, as far as there are devices: none without an accelerator."""
    return [n for n in (1, 2, 4, 8) if n <= torch.accelerator.device_count()]


def test_runner(
    rank: int,
    test_func: AnyCallable,
    deterministic: bool = False,  # noqa: PT028 (no test)
    *args: Tree,
    **kwargs: Tree,
) -> None:
    """Calls ``test_func(rank, *args, **kwargs)``, with ``deterministic`` after seeding."""
    if deterministic:
        make_cudnn_deterministic()
        torch.manual_seed(1357)
    test_func(rank, *args, **kwargs)


test_runner.__test__ = False  # type: ignore[attr-defined]  # where it is imported, pytest would collect it


def spawn_for_all_world_sizes(
    test_func: AnyCallable,
    world_sizes: Sequence[int] | None = None,
    args: Args = (),
    deterministic: bool = False,
) -> None:
    """For each world size, calls ``test_func(rank, world_size, file, file for rpc, *args)`` in a process for each rank.

    Args:
        test_func: can be pickled.
        world_sizes: default: :func:`get_world_sizes`.
        args: further arguments.
        deterministic: see :func:`test_runner`.
    """
    for world_size in get_world_sizes() if world_sizes is None else world_sizes:
        with temp_files_ctx(2) as files:
            spawn(test_runner, (test_func, deterministic, world_size, *files, *args), nprocs=world_size)


def worker_process(
    rank: int,
    world_size: int,
    filename: str,
    filename_rpc: str,
    func: AnyCallable,
    args: Args,
    error_queue: SimpleQueue[str],
) -> None:
    """A rank of :func:`torch_spawn`: with process groups and model parallelism of pipelines, calls ``func(*args)``."""
    if not dist_init(rank, world_size, filename, filename_rpc):
        teardown()
        return
    try:
        initialize_model_parallel(1, world_size, pipeline_backend="gloo")
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            func(*args)
    except BaseException as error:
        if type(error).__name__ != "Skipped":  # pytest's, for the process that started this one
            raise
        error_queue.put(str(error))
    finally:
        teardown()


def torch_spawn(
    world_sizes: Sequence[int] | None = None,
) -> Callable[[AnyCallable], AnyCallable]:
    """Decorates a function that is to be tested on ranks: its module gets ``test_<name>``, which pytest collects.

    The function takes the test's fixtures and parameters; ``rank`` among them is not passed.

    Args:
        world_sizes: default: :func:`get_world_sizes`.

    Raises:
        ConfigurationError: its name begins with ``test``: pytest would run it as it is.
    """

    def prepare_test(func: AnyCallable) -> AnyCallable:
        if func.__name__.startswith("test"):
            raise ConfigurationError(
                f"a function under @torch_spawn gets its test as test_{func.__name__}; its own name must not begin "
                "with test"
            )
        names = [name for name in inspect.signature(func).parameters if name != "rank"]

        @functools.wraps(func)
        def replacement(**kwargs: Tree) -> None:
            skipped = multiprocessing.get_context("spawn").SimpleQueue()
            args = tuple(kwargs[name] for name in names)
            spawn_for_all_world_sizes(worker_process, world_sizes, (func, args, skipped))
            if not skipped.empty():
                import pytest

                pytest.skip(skipped.get())

        func.__globals__[f"test_{func.__name__}"] = replacement
        return func

    return prepare_test
