"""Starts ranks on any backend."""

from __future__ import annotations

import datetime
import os
import re
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..backend import Backend, backend_for_device, get_backend
from ..errors import BackendError, ConfigurationError
from ..types import Args, T
from .started import StartedRank, note, started_rank


def launch(
    fn: Callable[..., T],
    world_size: int,
    *,
    backend: str | Backend | None = None,
    args: Args = (),
    timeout: float | None = None,
    start_timeout: float | None = 180.0,
) -> list[T]:
    """Runs ``fn(rank, *args)`` on ``world_size`` ranks of this machine and returns each rank's result.

    Ranks are processes (gloo, cuda, tpu), replicas on xla (TPU cores, or several on a CPU), or threads (simulated).
    A default process group exists inside ``fn`` where the backend has one, and is gone afterwards, whatever happened.

    A rank whose ``fn`` returns while others wait for it in a collective of shardkit ends the job with an
    OutOfStepError within seconds (on NCCL: when its own timeout is over).

    Started by ``shardkit run``, torchrun, srun, mpirun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment (Kubernetes), this process is one rank already: ``fn`` runs here, and the list holds the results of
    all ranks.

    Args:
        fn: an importable function (it travels to other processes by name).
        world_size: number of ranks.
        backend: "gloo", "cuda", "tpu", "xla", "simulated", or a package's. Default: the machine's accelerator
            (torch.accelerator) where a backend serves it, else gloo; gloo and a warning where devices are too few.
        args: further arguments, picklable.
        timeout: seconds that ``fn`` may take, after which ranks are ended; None: no limit.
        start_timeout: seconds that ranks may take to import the program and to meet, before ``fn`` begins; None: no
            limit. Ranks that are late are ended, and the error shows where each of them stands.

    Processes find what torchrun sets in their environment (RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, ...).

    Raises:
        RankFailedError: a rank raised, died or was too late. The others are ended at once; it holds the rank and its
            traceback.
        BackendError: the backend is not available on this machine, or ranks that others started do not meet.
        ConfigurationError: ``world_size`` does not fit the ranks that others started, or ``fn`` can't be sent to
            other processes.
    """
    chosen = backend or _of_machine(world_size)
    chosen = get_backend(chosen) if isinstance(chosen, str) else chosen
    if not chosen.is_available():
        raise BackendError(
            f"backend {chosen.name!r} is not available on this machine: no such device, or its package is not installed"
        )
    started = started_rank() if chosen.process_group_backend is not None else None
    if started is not None and (started.is_elastic or started.world_size > 1):
        return _run_as_started_rank(fn, world_size, chosen, args, started, start_timeout)
    return chosen.launch(fn, world_size, args, timeout=timeout, start_timeout=start_timeout)


def _of_machine(world_size: int) -> str | Backend:
    """Returns the backend where none is named."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "gloo"
    try:
        backend = backend_for_device(kind.type)
    except BackendError:  # a device without a library of collectives
        return "gloo"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    count = backend.device_count() or torch.accelerator.device_count()
    if count >= here:
        return backend
    warnings.warn(
        f"{here} ranks are on the host (gloo), since this machine has {count} {kind.type.upper()} devices; launch at "
        f"most that many ranks, or say which backend: launch(..., backend={backend.name!r}) or backend='gloo'",
        stacklevel=3,
    )
    return "gloo"


def _run_as_started_rank(
    fn: Callable[..., T],
    world_size: int,
    backend: Backend,
    args: Args,
    started: StartedRank,
    start_timeout: float | None,
) -> list[T]:
    if started.world_size != world_size:
        how = f"torchrun --nproc-per-node={world_size}" if started.is_elastic else "other numbers there"
        raise ConfigurationError(
            f"{started.by} started {started.world_size} ranks, launch was asked for {world_size}; pass "
            f"world_size={started.world_size} or {how}. If this process is no rank, and has only inherited these "
            "variables, unset them"
        )
    if not started.is_elastic:
        os.environ.update(started.variables())
    note()
    backend.device()  # selects the rank's device before the process group asks for it
    mine = not dist.is_initialized()
    if mine:
        _meet(backend, started, start_timeout)
    try:
        result = fn(started.rank, *args)
        return backend.group().all_gather_object(result, label="results of launch")
    finally:
        if mine:
            dist.destroy_process_group()


def _meet(backend: Backend, started: StartedRank, start_timeout: float | None) -> None:
    if started.is_elastic:
        # The agent's store outlives process groups: what an earlier launch's group wrote there would be taken for this
        # one's, and ranks would look for each other at addresses that are gone.
        found, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        number = found.add(f"shardkit/launches of rank {rank}", 1)
        own = dist.PrefixStore(f"shardkit/launch/{number}", found)  # type: ignore[attr-defined]
        dist.init_process_group(backend.process_group_backend, store=own, rank=rank, world_size=world_size)
        return
    if not started.address:
        raise ConfigurationError(
            f"{started.by} started ranks on several machines, and does not say where rank 0 is: set MASTER_ADDR (and "
            "MASTER_PORT) to an address of its machine, on all ranks"
        )
    place = f"{started.address}:{started.port} (MASTER_ADDR, MASTER_PORT)"
    limit = datetime.timedelta(seconds=start_timeout or 10**6)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            started.address, started.port, started.world_size, is_master=started.rank == 0, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        what = (
            "it could not listen there: the port is taken, or the address is another machine's; choose others"
        )
        if started.rank or not re.search("EADDRINUSE|listen", str(error)):
            what = f"not all were there after {limit}: others did not start, or can't reach that address"
        raise BackendError(
            f"rank {started.rank} of {started.world_size}, started by {started.by}, did not meet the others at "
            f"{place}: {what}. ({str(error).splitlines()[0]})"
        ) from error
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    dist.init_process_group(
        backend.process_group_backend, store=store, rank=started.rank, world_size=started.world_size
    )
