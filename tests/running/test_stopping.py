"""All ranks learn at the same step that the job is to stop, whoever was asked."""

from __future__ import annotations

import os
import signal
import time

import torch

import shardkit
from shardkit.launching import stopping
from tests.pools import on_ranks, rank_pool


def _steps_until_stop(rank: int, seconds: float) -> tuple[int, int]:
    """How many calls said no, and how many collectives that took."""
    stopping._stopping = stopping._Stopping()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    group = shardkit.backend.get_backend("gloo").group().channel("control")
    before, calls, began, is_sent = group._sequence, 0, time.monotonic(), False  # type: ignore[attr-defined]
    while not shardkit.stop_requested():
        calls += 1
        time.sleep(0.004 * (rank + 1))
        torch.distributed.barrier()
        if rank == 1 and not is_sent and time.monotonic() - began > seconds:
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        assert calls < 2000
    assert shardkit.stop_requested()
    return calls, group._sequence - before  # type: ignore[attr-defined]


def test_all_ranks_stop_at_the_same_step() -> None:
    found = rank_pool(3).run(_steps_until_stop, 1.5)
    assert len(set(found)) == 1
    calls, collectives = found[0]
    assert calls > 30
    assert collectives <= 8 < calls / 4  # a few at the start, then one a second


@on_ranks(2)
def test_one_process(rank: int) -> None:
    asked = stopping._Stopping()
    asked.install()
    assert not asked.requested(None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # once more, and the process ends
    assert asked.requested(None)


@on_ranks(2)
def test_a_handler_of_the_programs_own_stays(rank: int) -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    stopping._Stopping().install()
    kept = signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert kept
