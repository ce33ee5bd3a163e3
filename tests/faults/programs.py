"""What each rank does in a case of :mod:`tests.faults.cases`, after one step that went well."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from tests.faults.trainers import Trainer, make_trainer

FOR_EVER = 600.0


# ------------------------------------------------------------------ other numbers of steps
def uneven_then_collective(rank: int, trainer: Trainer) -> None:
    if rank == 1:
        trainer.step()  # one batch more
    trainer.collect()


def uneven_then_barrier(rank: int, trainer: Trainer) -> None:
    if rank == 1:
        trainer.step()
    dist.barrier()


def skipped_batch(rank: int, trainer: Trainer) -> None:
    for batch in range(3):
        if not (rank == 0 and batch == 1):
            trainer.step()
    dist.barrier()


def skipped_backward(rank: int, trainer: Trainer) -> None:
    for batch in range(3):
        loss = trainer.forward()
        if rank == 0 and batch == 1:
            continue
        loss.backward()
        trainer.optimizer.step()
    dist.barrier()


def no_sync_on_one(rank: int, trainer: Trainer) -> None:
    with trainer.no_sync() if rank == 0 else contextlib.nullcontext():
        trainer.backward()
    dist.barrier()


def another_library(rank: int, trainer: Trainer) -> None:
    group = dist.new_group([0, 1])
    if rank == 1:
        trainer.step()
    dist.all_reduce(torch.ones(4), group=group)


def work_of_torch(rank: int, trainer: Trainer) -> None:
    if rank == 1:
        trainer.step()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()


# ------------------------------------------------------------------ other calls
def other_order(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        chain: Any = getattr(trainer.model, "module", trainer.model)
        chain.order = ("b", "a")
    trainer.step()


def other_order_in_evaluation(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        chain: Any = getattr(trainer.model, "module", trainer.model)
        chain.order = ("b", "a")
    with torch.no_grad():
        trainer.forward()


def parameters_on_one(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        trainer.collect()
    trainer.step()


# ------------------------------------------------------------------ errors that one rank raises, and stays
@contextlib.contextmanager
def failing(trainer: Trainer, in_backward: bool) -> Any:
    model = getattr(trainer.model, "module", trainer.model)
    hooked: Any = model.a if hasattr(model, "a") else model
    before = hooked.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not in_backward:
            raise ValueError("boom")
        x = x * 1.0
        x.register_hook(_raise)
        return before(x)  # type: ignore[no-any-return]

    hooked.forward = forward
    try:
        yield
    finally:
        hooked.forward = before


def _raise(_: Any) -> None:
    raise ValueError("boom")


def _swallowed_and_silent(rank: int, trainer: Trainer, cause: Any, steps: int = 1) -> None:
    """Rank 0 steps inside of ``cause``, swallows the error of that, and sleeps."""
    if rank == 0:
        with cause, contextlib.suppress(ValueError):
            trainer.step()
        time.sleep(FOR_EVER)
    for _ in range(steps):
        trainer.step()


def raises_in_forward(rank: int, trainer: Trainer) -> None:
    _swallowed_and_silent(rank, trainer, failing(trainer, False))


def raises_in_backward(rank: int, trainer: Trainer) -> None:
    _swallowed_and_silent(rank, trainer, failing(trainer, True))


def raises_between(rank: int, trainer: Trainer) -> None:
    try:
        loss = trainer.forward()
        if rank == 0:
            raise ValueError("boom")
        loss.backward()
        trainer.optimizer.step()
    except ValueError:
        time.sleep(FOR_EVER)


def raises_of_shardkit(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        with contextlib.suppress(shardkit.ShardkitError):
            trainer.refused()
        time.sleep(FOR_EVER)
    trainer.step()


def raises_in_step(rank: int, trainer: Trainer) -> None:
    inner: Any = trainer.optimizer
    if rank == 0:
        inner.optim.step = lambda: _raise(None)
    _swallowed_and_silent(rank, trainer, contextlib.nullcontext(), steps=2)


def raises_at_construction(rank: int, strategy: str) -> None:
    if rank == 0:
        with contextlib.suppress(shardkit.ShardkitError):
            split = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
            if strategy == "fsdp":
                shardkit.FSDP(split)
            else:
                shardkit.OSS(split.parameters())
        time.sleep(FOR_EVER)
    make_trainer(strategy)


def raises_in_thread(rank: int, trainer: Trainer) -> None:
    def train() -> None:
        trainer.step()
        trainer.step()
        _raise(None)

    if rank == 0:
        threading.Thread(target=train).start()
        time.sleep(FOR_EVER)
    for _ in range(3):
        trainer.step()


def swallowed_and_on(rank: int, trainer: Trainer) -> None:
    for batch in range(3):
        if rank == 0 and batch == 1:
            with failing(trainer, True), contextlib.suppress(ValueError):
                trainer.step()
        else:
            trainer.step()
    dist.barrier()


def _caught_and_on(rank: int, trainer: Trainer, after: str) -> None:
    for batch in range(4):
        with contextlib.suppress(ValueError):
            loss = trainer.forward()
            if rank == 0 and batch == 1 and after == "forward":
                _raise(None)
            loss.backward()
            if rank == 0 and batch == 1:
                _raise(None)
            trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    dist.barrier()


def raises_before_step(rank: int, trainer: Trainer) -> None:
    _caught_and_on(rank, trainer, "backward")


def raises_in_loss(rank: int, trainer: Trainer) -> None:
    _caught_and_on(rank, trainer, "forward")


# ------------------------------------------------------------------ ranks and connections that end
def _signalled(rank: int, trainer: Trainer, number: signal.Signals) -> None:
    trainer.step()
    if rank == 1:
        os.kill(os.getpid(), number)
    for _ in range(100):
        trainer.step()


def killed(rank: int, trainer: Trainer) -> None:
    _signalled(rank, trainer, signal.SIGKILL)


def killed_in_an_agreement(rank: int, trainer: Trainer) -> None:
    """When it has said for a while where it stands; the other one wants to leave the order of gathers."""
    if rank == 1:
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        trainer.forward()
        trainer.forward()


def reset(rank: int, trainer: Trainer) -> None:
    if rank == 1:
        at_once = struct.pack("ii", 1, 0)  # closing sends a reset
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        os._exit(7)
    for _ in range(3):
        trainer.step()


# ------------------------------------------------------------------ slow, not lost
def slow(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        time.sleep(9)
    trainer.step()


def slow_in_a_handler(rank: int, trainer: Trainer) -> None:
    if rank == 0:
        try:
            raise OSError("no data yet")
        except OSError:
            time.sleep(9)
    trainer.step()


def slow_group_of_others(rank: int, trainer: Trainer) -> None:
    others = dist.new_group([0, 2])
    if rank == 2:
        time.sleep(9)
    if rank != 1:
        dist.barrier(group=others)
    trainer.step()


def stopped(rank: int, trainer: Trainer) -> None:
    _signalled(rank, trainer, signal.SIGSTOP)
