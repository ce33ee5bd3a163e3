"""What a step sends, counted: what theory says, in one all-to-all each way, and nothing for element-wise optimizers."""

from __future__ import annotations

from typing import Any

import torch

from shardkit import FSDP, WholeParameters
from tests.figures.counters import OperationCounter
from tests.pools import rank_pool
from tests.whole_parameters.nets import net, train, wrap

WIDTH = 32


def theory(model: Any, optimizer: WholeParameters, rank: int, world_size: int) -> int:
    """Bytes that this rank sends: value, gradient and a flag's share of what is elsewhere; values back."""
    sent = 0
    for parts in _shards(model):
        total = sum(numel for _, numel in parts)
        size = -(-total // world_size)
        start = 0
        for name, numel in parts:
            owner = optimizer.owner_of(name)
            for there in range(world_size) if owner is not None else ():
                piece = max(0, min(start + numel, (there + 1) * size) - max(start, there * size))
                if there == rank != owner and piece:
                    sent += 2 * piece + 1
                if owner == rank != there:
                    sent += piece
            start += numel
    return 8 * sent


def _shards(model: Any) -> list[list[tuple[str, int]]]:
    """Names and numels in each flat parameter: the units 0 and 2, and the rest."""
    found: dict[str, list[tuple[str, int]]] = {"0": [], "2": [], "rest": []}
    for name, p in net(width=WIDTH).named_parameters():
        found[name[0] if name[0] in found else "rest"].append((name, p.numel()))
    return list(found.values())


def count(
    rank: int, world_size: int, optim: Any, options: dict[str, Any]
) -> tuple[int, float, dict[str, int], int]:
    model = FSDP(net(width=WIDTH), **options) if options else wrap(net(width=WIDTH), "fsdp")
    optimizer = WholeParameters(model, optim, lr=0.01)
    train(model, optimizer, rank, world_size, steps=range(2), width=WIDTH)
    with OperationCounter(world_size) as counter:
        optimizer.step()
    return (
        theory(model, optimizer, rank, world_size),
        counter.sent,
        dict(counter.collectives),
        counter.operations,
    )


def test_bytes_of_a_step() -> None:
    pool = rank_pool(3)
    found = pool.run(count, 3, torch.optim.Muon, {})
    assert sum(wanted for wanted, *_ in found) > 0
    for wanted, sent, collectives, _ in found:
        assert sent == wanted
        assert set(collectives) <= {"alltoall_base_"}
        assert sum(collectives.values()) <= 2
    for optim, options in ((torch.optim.AdamW, {}), (torch.optim.Muon, {"align": "parameters"})):
        for _, sent, collectives, _ in pool.run(count, 3, optim, options):
            assert (sent, collectives) == (0.0, {})


def owners(rank: int) -> list[list[int]]:
    """By the optimizer's cost, and by another one, for which a matrix is nothing."""
    found = []
    for cost in (None, lambda _, shape: 1.0 if len(shape) == 1 else 0.0):
        model = wrap(net(width=WIDTH), "fsdp")
        options = {} if cost is None else {"cost": cost}
        optimizer = WholeParameters(model, torch.optim.Adafactor, lr=0.01, **options)
        numels = {n: p.numel() for n, p in net(width=WIDTH).named_parameters()}
        loads = [0, 0]
        for name, numel in numels.items():
            owner = optimizer.owner_of(name)
            assert owner is not None
            loads[owner] += numel if cost is None else len(name) > 8  # "0.bias" and the like are shorter
        found.append(loads)
        if cost is not None:
            of_vectors = [optimizer.owner_of(n) for n in ("0.bias", "3.weight", "3.bias", "4.bias")]
            assert sorted(of_vectors) == [0, 0, 1, 1]
    return found


def test_owners_are_balanced_by_cost() -> None:
    by_numel, _ = rank_pool(2, "simulated").run(owners)[0]
    assert max(by_numel) <= 1.1 * sum(by_numel) / 2 + WIDTH * WIDTH
