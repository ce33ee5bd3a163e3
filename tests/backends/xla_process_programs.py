"""What the replicas of test_xla_process.py run, and what their data loaders' workers import: little."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[Any]):
    """Each with the process that it was read in."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def load(rank: int, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    loader = DataLoader(Numbers(), batch_size=2, **options)
    batches = [torch.stack(batch) for _ in range(2) for batch in loader]
    numbers, readers = torch.cat(batches, 1).tolist()
    return numbers, sorted({*readers})


def memory(rank: int) -> dict[str, int]:
    import torch_xla.core.xla_model as xm

    info: dict[str, int] = xm.get_memory_info(xm.xla_device())
    return info


def _start_others(rank: int) -> Iterator[int]:
    """Processes: a worker in the middle of an epoch, and one that is no business of Python's."""
    reader = iter(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"))
    yield int(next(reader)[1])
    yield subprocess.Popen(["sleep", "1000"]).pid
    yield os.getpid()
    next(reader)


def start_others_and_wait(rank: int) -> None:
    for process in _start_others(rank):
        print(process, flush=True)
    time.sleep(1000)


def start_others_and_abort(rank: int, file: str) -> None:
    with open(file, "a") as f:
        for process in _start_others(rank):
            print(process, file=f, flush=True)
    from shardkit.backend import get_backend

    get_backend("xla").group().barrier()  # both are here
    if rank == 1:
        os.abort()
    get_backend("xla").group().barrier()


def ends(process: int) -> bool:
    """Whether it is gone, at the latest after 20 s."""
    for _ in range(400):  # as long as a busy machine takes
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
