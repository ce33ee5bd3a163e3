"""Gradients of an FSDP module's parameters(), asked for by name: shards, which autograd never sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardkit import ShardedDDP
from shardkit.errors import LifecycleError
from tests.border.strategies import WORLDS, batch, loss_of, twins
from tests.pools import on_ranks

REFUSED: dict[str, Callable[[torch.Tensor, list[Any]], Any]] = {
    "grad": lambda loss, shards: torch.autograd.grad(loss, shards),
    "allow_unused": lambda loss, shards: torch.autograd.grad(loss, shards, allow_unused=True),
    "one of them": lambda loss, shards: torch.autograd.grad(loss, shards[-1], materialize_grads=True),
    "batched": lambda loss, shards: torch.autograd.grad(loss, shards, torch.ones(2), is_grads_batched=True),
    "backward": lambda loss, shards: loss.backward(inputs=shards),
    "one in backward": lambda loss, shards: torch.autograd.backward([loss], inputs=shards[0]),
}


@on_ranks(*WORLDS)
def test_gradients_of_shards(rank: int, world_size: int) -> None:
    """Refused before anything runs: the same loss has its gradients afterwards."""
    for strategy in ("fsdp", "units", "unflattened", "in_place", "torch_fsdp", "torch_fsdp_orig"):
        pair = twins(rank, world_size, strategy)
        losses = [loss_of(pair.plain, r) for r in range(world_size)]
        torch.stack(losses).mean().backward()
        loss = loss_of(pair.model, rank)
        for ask in REFUSED.values():
            with pytest.raises(
                LifecycleError, match=rf"rank {rank}: torch\.autograd\.grad .* Call loss\.backward\(\)"
            ):
                ask(loss, list(pair.model.parameters()))
        assert all(p.grad is None for p in pair.model.parameters())
        loss.backward()
        pair.step()
        pair.assert_equal()


@on_ranks((2, "simulated"), (3, "simulated"))
def test_gradients_of_a_sharded_ddp(rank: int, world_size: int) -> None:
    """Gradients that nothing would average are refused, and what was reduced before stays what it is."""
    pair = twins(rank, world_size, "sharded_ddp")
    model, params = pair.model, [*pair.model.parameters()]
    assert isinstance(model, ShardedDDP)
    pair.backward()
    for options in ({}, {"allow_unused": True}):
        with pytest.raises(LifecycleError, match=rf"rank {rank}: torch\.autograd\.grad .* no_sync\(\)"):
            torch.autograd.grad(loss_of(model, rank), params, **options)
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(LifecycleError, match=rf"rank {rank}: torch\.func\.grad .*\.module"):
            torch.func.grad(lambda p: torch.func.functional_call(model, p, batch(rank)).sum())(
                dict(model.named_parameters())
            )
    assert torch.func.grad(lambda x: model(x).sum())(batch(rank)).shape == batch(rank).shape
    with model.no_sync():
        own = torch.autograd.grad(loss_of(model, rank), params)
    expected = torch.autograd.grad(loss_of(pair.plain, rank), [*pair.plain.parameters()])
    torch.testing.assert_close(own, expected)
    pair.step()
    pair.assert_equal()
