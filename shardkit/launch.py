"""Starts ranks on any backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from .backend import Backend, get_backend
from .errors import BackendError, ConfigurationError
from .types import Args

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    world_size: int,
    *,
    backend: str | Backend = "gloo",
    args: Args = (),
    timeout: float | None = None,
    start_timeout: float | None = 180.0,
) -> list[T]:
    """Runs ``fn(rank, *args)`` on ``world_size`` ranks of this machine and returns each rank's result.

    Ranks are processes on gloo and cuda, replicas on xla (TPU cores, or threads with real collectives on a CPU), and
    deterministic threads on simulated. A default process group exists inside ``fn`` where the backend has one,
    and is gone afterwards, whatever happened.

    A rank whose ``fn`` returns while others wait for it in a collective of shardkit ends the job with an
    OutOfStepError within seconds (on NCCL: when its own timeout is over).

    Started by torchrun, this process is one rank already: ``fn`` runs here, and the list holds the results of
    all ranks.

    Args:
        fn: an importable function (it travels to other processes by name).
        world_size: number of ranks.
        backend: "gloo", "cuda", "xla", "simulated", or what an installed package adds.
        args: further arguments, picklable.
        timeout: seconds that ``fn`` may take, after which ranks are ended; None: no limit.
        start_timeout: seconds that ranks may take to import the program and to meet, before ``fn`` begins; None: no
            limit. Ranks that are late are ended, and the error shows where each of them stands.

    Processes find what torchrun sets in their environment (RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, ...).

    Raises:
        RankFailedError: a rank raised, died or was too late. The others are ended at once; it holds the rank and its
            traceback.
        BackendError: the backend is not available on this machine.
        ConfigurationError: ``world_size`` does not fit the ranks that torchrun started, or ``fn`` can't be sent to
            other processes.
    """
    chosen = get_backend(backend) if isinstance(backend, str) else backend
    if not chosen.is_available():
        raise BackendError(
            f"backend {chosen.name!r} is not available on this machine: no such device, or its package is not installed"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and chosen.process_group_backend is not None:
        return _run_as_started_rank(fn, world_size, chosen, args)
    return chosen.launch(fn, world_size, args, timeout=timeout, start_timeout=start_timeout)


def _run_as_started_rank(fn: Callable[..., T], world_size: int, backend: Backend, args: Args) -> list[T]:
    """One of the ranks that torchrun started."""
    import torch.distributed as dist

    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ConfigurationError(
            f"torchrun started {started} ranks, launch was asked for {world_size}; pass world_size={started} or "
            f"torchrun --nproc-per-node={world_size}"
        )
    backend.device()  # selects the rank's device before the process group asks for it
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group(backend.process_group_backend)
    try:
        result = fn(int(os.environ["RANK"]), *args)
        return backend.group().all_gather_object(result, label="results of launch")
    finally:
        if mine:
            dist.destroy_process_group()
