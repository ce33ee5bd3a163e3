"""Pools of ranks that stay alive across the tests of a session: starting one costs seconds, a call milliseconds."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol
from unittest import mock

import pytest

from shardkit.backends.processes import RankPool, join_ranks

MOST_POOLS = 6  # with processes, of some 350 MB a rank
RANKS_SECONDS = 400.0  # a call may take; tests end at 600 (pyproject.toml), with less to tell
MANY_THREADS = 40  # of a rank; those of the default group and of torch are about 25

# Most of the tests' time would go into compiling well what runs a few times. So: no optimization, no MLIR context for
# each fusion, no split of a program into as many modules as there are threads. Numbers differ by rounding alone.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


# "streams": ranks have a simulated device with streams, which finds what CUDA and NCCL would not forgive.
# "cuda": all ranks are on the first CUDA device, and make their tensors there.
DEVICE = {"name": "plain"}


class Pool(Protocol):
    """Ranks that run functions."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...
    def close(self) -> None: ...


_pools: dict[tuple[int, str], Pool] = {}
USED: set[tuple[int, str]] = set()  # asked for since somebody cleared it


def rank_pool(world_size: int, backend: str = "gloo") -> Pool:
    """The session's pool of that many ranks."""
    key = (world_size, backend)
    USED.add(key)
    if key not in _pools:
        _make_room()
    pool = _pools[key] = _pools.pop(key, None) or _make(world_size, backend)  # the last used stands last
    return pool


def run_once(world_size: int, backend: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On ranks that nobody needs afterwards, as they may be out of step or gone."""
    pool = _make(world_size, backend)
    try:
        return pool.run(fn, *args)
    finally:
        pool.close()


def on_ranks(*worlds: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what each rank does, given its number, ``world_size`` if asked for, and the test's arguments.

    A world is a number of ranks over gloo, (number, backend), or one of tests/backends/environments.py; of several each
    is a test.
    """
    cases = [w if hasattr(w, "marks") else pytest.param(w, id=str(w)) for w in worlds]
    cases = [c if len(c.values) == 1 else pytest.param(c.values[::-1], marks=c.marks, id=c.id) for c in cases]

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        def test(world: Any = worlds[0], **given: Any) -> None:
            given["world_size"], given["backend"] = world if isinstance(world, tuple) else (world, "gloo")
            pool = rank_pool(given["world_size"], given["backend"])
            pool.run(program, *(given[name] for name in asked))

        functools.update_wrapper(test, program)  # the lines that pytest shows are the program's
        asked = [n for n, p in inspect.signature(program).parameters.items() if p.default is p.empty][1:]
        wanted = [name for name in asked if name not in ("world_size", "backend")]
        wanted += ["world"] * (len(cases) > 1)
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in wanted]
        )
        program.__name__ = program.__qualname__ = f"_ranks_of_{program.__name__}"  # by which ranks find it
        program.__globals__[program.__name__] = program
        return pytest.mark.parametrize("world", cases)(test) if len(cases) > 1 else test

    return decorate


def _make_room() -> None:
    """Ends the pool that was asked for longest ago, where there are many."""
    with_processes = [key for key, pool in _pools.items() if not isinstance(pool, SimulatedPool)]
    for key in with_processes[: max(0, len(with_processes) + 1 - MOST_POOLS)]:
        _pools.pop(key).close()


def _make(world_size: int, backend: str) -> Pool:
    if backend in ("xla", "xla without rules"):
        from shardkit.backends.xla.pool import ReplicaPool

        without = {} if backend == "xla" else {"SHARDKIT_XLA_RULES": ""}
        return ReplicaPool(world_size, environment={"OMP_NUM_THREADS": "1"} | without)
    if backend in ("simulated", "streams"):
        return SimulatedPool(world_size, backend)
    if backend.startswith("one device over "):  # all ranks are on the first
        from tests.backends import cuda_programs

        start = getattr(cuda_programs, f"over_{backend.rpartition(' ')[2]}")
        return PausedPool(world_size, "cuda", start=start)
    if backend in ("late", "tpu"):  # a device of our own, see tests/late_device
        from tests.late_device import ranks

        start = getattr(ranks, f"start_{backend}")
        return ForkedPool(world_size, backend, start=start)
    if backend == "torch_tpu":  # see tests/torch_tpu
        from tests.torch_tpu import runtime
        from tests.torch_tpu.ranks import start

        return PausedPool(world_size, "tpu", start=start, environment=runtime.variables())
    if backend == "fairscale":
        from shardkit.tools.verify.fairscale_ranks import start_rank

        return ForkedPool(world_size, start=start_rank)
    if backend != "gloo":
        return PausedPool(world_size, backend)
    if DEVICE["name"] == "streams":
        return StreamsPool(world_size, start=_start_with_streams)
    if DEVICE["name"] == "cuda":
        from tests.backends import cuda_programs

        return CudaPool(world_size, "cuda", start=cuda_programs.over_both)
    return TidyPool(world_size)


class PausedPool(RankPool):
    """Ranks that stand still between calls.

    Each gloo group has a thread that wakes up a hundred times a second: ranks that wait took a third of two cores.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        *,
        environment: dict[str, str] | None = None,
        start: Callable[..., None] | None = None,
    ) -> None:
        environment = {"OMP_NUM_THREADS": "1"} | (environment or {})
        super().__init__(world_size, backend, start=start, timeout=RANKS_SECONDS, environment=environment)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        try:
            return super().run(_ending_with_the_tests, fn, *args)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self, kill: bool = True) -> None:
        """Who stands still can't end politely, and it is not worth the seconds."""
        super().close(kill=True)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)


@functools.cache
def _end_with_the_tests() -> None:
    """Who stands still does not notice that nobody is there any more.

    What was imported by now is left alone by collections of garbage, of which tests ask for many.
    """
    gc.freeze()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _ending_with_the_tests(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    _end_with_the_tests()
    return fn(rank, *args)


class ForkedPool(PausedPool):
    """Ranks that are forks of a process which has imported what each of them would take seconds to import."""

    def _begin(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        with mock.patch("multiprocessing.get_context", return_value=context):
            super()._begin()


class TidyPool(ForkedPool):
    """Ends groups of ranks that tests leave behind: hundreds in a session, with a thread and connections each.

    It is done before the first call of another file, when no rank is inside of a collective any more, and no test comes
    back to them.
    """

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(_after_tidying, fn, *args)


_file = ""  # of this rank's last call


def _forget_meshes() -> None:
    """Clears what DTensor remembers of operations: results have the first of equal meshes, whose group may be gone."""
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # before torch 2.10
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear  # type: ignore[attr-defined]
    clear()


def _after_tidying(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    global _file
    before, _file = _file, fn.__module__
    if before != _file and len(os.listdir("/proc/self/task")) > MANY_THREADS:
        import torch.distributed as dist

        from shardkit.internal.params import _groups

        everyone = dist.group.WORLD
        kept = {everyone, *_groups.get(everyone, {}).values()}
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in kept:
                dist.destroy_process_group(group)
        _forget_meshes()
        gc.collect()  # models that are in circles hold connections of their own
    return fn(rank, *args)


class StreamsPool(ForkedPool):
    """Ranks that have a simulated device each for the time of a call."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        from tests.backends.streams_device import check_order

        answers = super().run(_on_streams, fn, *args)
        check_order([issued for _, issued in answers])
        return [result for result, _ in answers]


def _start_with_streams(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    from shardkit import backend as backends
    from tests.backends.streams_device import StreamsOverGloo

    backends._instances["gloo"] = StreamsOverGloo()
    join_ranks(rank, world_size, rendezvous, backend)


def _on_streams(rank: int, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    from tests.backends.streams_device import watched

    with watched(rank) as device:
        result = _after_tidying(rank, fn, *args)
    return result, device.issued


class CudaPool(ForkedPool):
    """Ranks that make their tensors on the first CUDA device; what comes and goes with a call is on the CPU."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(_on_cuda, fn, *args)


def _on_cuda(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    from tests.backends.cuda_programs import MadeOnDevice

    def moved(values: Any, device: str) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(device), values)

    with MadeOnDevice():
        result = _after_tidying(rank, fn, *moved(args, "cuda"))
    return moved(result, "cpu")


class SimulatedPool:
    """Threads of this process; nothing to keep alive."""

    def __init__(self, world_size: int, backend: str) -> None:
        self._world_size = world_size
        self._backend = "streams" if DEVICE["name"] == "streams" else backend
        self.timeout = RANKS_SECONDS

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        from shardkit.backend import get_backend

        return get_backend(self._backend).launch(fn, self._world_size, args, timeout=self.timeout)

    def close(self) -> None:
        """Nothing to end."""


def close_pools() -> None:
    """Ends all ranks."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def free_port() -> int:
    """A port of this machine that nobody listens on, for ranks which meet without a pool."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
