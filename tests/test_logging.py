"""What the ``shardkit`` logger says by itself."""

from __future__ import annotations

import logging
import time

import torch
from torch import nn

import shardkit
from shardkit.backend import get_backend
from shardkit.backends.c10d import group as c10d_group
from tests.pools import on_ranks


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def _listen() -> _Lines:
    logger, handler = logging.getLogger("shardkit"), _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


@on_ranks(2)
def test_what_was_wrapped(rank: int) -> None:
    fsdp, ddp = _listen(), _listen()
    reduce = shardkit.ReducePolicy(order="fixed")
    module = nn.Sequential(shardkit.FSDP(nn.Linear(4, 4), reduce=reduce), nn.Linear(4, 3))
    model = shardkit.FSDP(module, reduce=reduce)
    for _ in range(2):
        model(torch.ones(1, 4))
    logging.getLogger("shardkit").removeHandler(fsdp)
    ddp.lines.clear()
    plain = nn.Linear(4, 3)
    oss = shardkit.OSS(plain.parameters(), torch.optim.SGD, lr=0.1)
    shardkit.ShardedDDP(plain, oss, reduce=reduce)
    logging.getLogger("shardkit").removeHandler(ddp)
    fsdp, ddp = fsdp.lines, ddp.lines
    # 20 and 15 elements: 10 and 8 a rank
    assert fsdp == [
        f"INFO rank {rank}: FSDP of 2 units, 4 parameters in shards of 72 bytes a rank; backend gloo, world size 2, "
        "sums over 2 micro-batches in a fixed order"
    ]
    owned = (48, 12)[rank]
    assert ddp == [
        f"INFO rank {rank}: ShardedDDP of 2 parameters (60 bytes), {owned} bytes of them owned by this rank; "
        "backend gloo, world size 2, sums over 2 micro-batches in a fixed order"
    ]


@on_ranks(2)
def test_a_long_wait(rank: int) -> None:
    handler, group = _listen(), get_backend("gloo").group()
    before, c10d_group._WARN_SECONDS = c10d_group._WARN_SECONDS, 0.5
    if rank == 1:
        time.sleep(2.5)
    group.all_reduce(torch.ones(3), label="loss")
    c10d_group._WARN_SECONDS = before
    logging.getLogger("shardkit").removeHandler(handler)
    if rank == 0:
        assert any(
            "WARNING rank 0 has waited" in s and "all_reduce of 3 elements (loss)" in s for s in handler.lines
        )
