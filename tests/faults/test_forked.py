"""Sharded modules called in processes that were forked from a rank: refused there, and the rank goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from shardkit import FSDP, OSS, ShardedDDP
from shardkit.errors import LifecycleError
from tests.border.strategies import batch, loss_of, twins
from tests.pools import on_ranks

REFUSED = r"forked from rank {} .* num_workers=0"


class _Encoding:
    """What a loader's worker does with a batch."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, samples: Any) -> Any:
        torch.set_num_threads(1)
        with torch.no_grad():
            return self.call(default_collate(samples))


def _loaded(call: Any, rank: int) -> list[torch.Tensor]:
    """Batches of a loader with a forked worker that calls something."""
    loader = DataLoader(
        list(batch(rank)),
        3,
        num_workers=1,
        collate_fn=_Encoding(call),
        multiprocessing_context="fork",
        timeout=400,
    )
    return list(loader)


@on_ranks(1, 2, (2, "simulated"))
def test_workers_of_a_loader(rank: int, world_size: int) -> None:
    pair = twins(rank, world_size, "units")
    pair.backward()  # connected, and every call of a step is known
    pair.step()
    pair.zero_grad()
    built_in_child = lambda x: FSDP(nn.Linear(5, 4))(x)  # noqa: E731
    if world_size == 1:
        torch.testing.assert_close(
            torch.cat(_loaded(pair.model, rank)), pair.plain(batch(rank)), rtol=0, atol=1e-6
        )
    else:
        for call in (pair.model, built_in_child):
            with pytest.raises(LifecycleError, match=REFUSED.format(rank)):
                _loaded(call, rank)
    inner = nn.Linear(5, 4)
    optimizer = OSS(inner.parameters(), torch.optim.SGD, lr=0.1)
    replicated = ShardedDDP(inner, optimizer).eval()  # needs no other rank
    torch.testing.assert_close(torch.cat(_loaded(replicated, rank)), inner(batch(rank)), rtol=0, atol=1e-6)
    pair.backward()
    pair.step()
    pair.assert_equal()
    assert loss_of(pair.model, rank).isfinite()
