"""Models that are not used any more are freed, with their parameters, shards and optimizer state."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from tests.border.strategies import STRATEGIES, run, twins


def _freed(rank: int, world_size: int, strategy: str) -> None:
    t = twins(rank, world_size, strategy, torch.optim.Adam, lr=0.1)
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.step()
    twin = copy.deepcopy(t.model)
    models = [t.model, twin]
    if strategy != "sharded_ddp":
        models += [m.module for m in models if hasattr(m, "module")]
    seen = [weakref.ref(m) for model in models for m in model.modules()]
    seen += [weakref.ref(p) for model in models for p in model.parameters()]
    seen += [weakref.ref(v) for s in t.optimizer.state.values() for v in s.values()]
    del t, twin, models
    gc.collect()
    assert not [r() for r in seen if r() is not None]


@pytest.mark.parametrize("world", [(2, "gloo"), (2, "simulated")], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_are_freed(world: tuple[int, str], strategy: str) -> None:
    run(world, _freed, strategy)
