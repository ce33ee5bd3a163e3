"""The same program gives the same bits, whatever else the machine does: sums over ranks are formed in one order.

Beside it runs what takes the processor away from ranks, so that they arrive in other orders.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import OSS, ShardedDDP
from shardkit.backends.processes import RankPool
from tests.border.strategies import loss_of, make_model, wrapped
from tests.pools import rank_pool

WORLD = 3


@pytest.fixture
def _busy_machine() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


def _digest(model: nn.Module) -> str:
    bits = b"".join(v.detach().numpy().tobytes() for v in model.state_dict().values())
    return hashlib.sha1(bits).hexdigest()


def _lbfgs(rank: int) -> tuple[nn.Module, Any]:
    inner = make_model()
    oss = OSS(inner.parameters(), torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    return ShardedDDP(inner, oss), oss


def _sharded_ddp(rank: int) -> tuple[nn.Module, Any]:
    inner = make_model()
    oss = OSS(inner.parameters(), torch.optim.AdamW, lr=0.1)
    return ShardedDDP(inner, oss), oss


def _fsdp(rank: int) -> tuple[nn.Module, Any]:
    model = wrapped("units", make_model())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _program(rank: int, repeat: int) -> list[list[str]]:
    found = []
    for _ in range(repeat):
        digests = []
        for build in (_lbfgs, _sharded_ddp, _fsdp):
            model, optimizer = build(rank)
            for step in range(4):

                def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, rank, step)
                    loss.backward()
                    if not isinstance(getattr(optimizer, "optim", None), torch.optim.LBFGS):
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    return loss

                optimizer.step(closure)
            digests.append(_digest(model))
        found.append(digests)
    return found


@pytest.mark.usefixtures("_busy_machine")
def test_the_same_program_gives_the_same_bits() -> None:
    """On every rank, again and again in one set of processes, and in another one."""
    other = RankPool(WORLD, "gloo", timeout=400, environment={"OMP_NUM_THREADS": "1"})
    try:
        runs = [r for pool in (rank_pool(WORLD), other) for rank in pool.run(_program, 2) for r in rank]
    finally:
        other.close(kill=True)
    assert len({tuple(r) for r in runs}) == 1
