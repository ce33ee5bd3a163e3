"""torch_xla.distributed.xla_multiprocessing: starts ranks, any number of them on a machine without an accelerator."""

from __future__ import annotations

import os

from shardkit.backends.xla import has_accelerator
from shardkit.errors import ConfigurationError
from shardkit.launching import launch
from shardkit.types import AnyCallable, Args
from shardkit.xla.ranks import names_of

__getattr__ = names_of("torch_xla.distributed.xla_multiprocessing")


def spawn(
    fn: AnyCallable,
    args: Args = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Runs ``fn(rank, *args)`` on all XLA devices, or on replicas on the CPU.

    Args:
        fn: an importable function.
        args: further arguments, picklable.
        nprocs: number of ranks. None: all devices; on a CPU as many as ``CPU_NUM_DEVICES`` says, else one. On a TPU
            1 is one of its devices, in this process.
        join: has to be true.
        daemon, start_method: accepted.

    Raises:
        RankFailedError: a rank raised; the others are ended.
        ConfigurationError: ``nprocs`` is not the number of devices; ``join=False``.
    """
    if not join:
        raise ConfigurationError("spawn(join=False) is not supported; start a thread that calls spawn")
    if nprocs in (None, 1) and has_accelerator():
        import torch_xla.distributed.xla_multiprocessing as original

        original.spawn(fn, args, nprocs=nprocs, start_method=start_method)
        return
    count = int(os.environ.get("CPU_NUM_DEVICES", "1")) if nprocs is None else nprocs
    launch(fn, count, backend="xla", args=args)
