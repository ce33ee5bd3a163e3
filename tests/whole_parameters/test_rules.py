"""Which optimizer has which parameters, and what trying a class finds out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, WholeParameters, fully_shard
from shardkit.errors import ConfigurationError
from shardkit.optimizers.elementwise import Verdict, couples_parameters, judge
from shardkit.training.whole_parameters.optimizer import cost_of
from tests.figures.counters import OperationCounter
from tests.pools import on_ranks, rank_pool
from tests.whole_parameters.nets import difference, net, train, wrap


class Plain(torch.optim.SGD):
    """Unknown to shardkit, and element-wise."""


class Late(Plain):
    """Element-wise for a while, and then not: what it keeps shows it."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            products = self.state[p].setdefault("products", torch.zeros(p.shape[0], p.shape[0]))
            if p.ndim == 2:
                products.add_(p.grad @ p.grad.T)


class Switched(Plain):
    """As schedule-free ones."""

    training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise Exception("call train() first")
        super().step()


compiled: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    compiled.append(len(inputs))
    return graph


@torch.compile(backend=counting)
def update(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return p - 0.1 * gradient


class Compiled(Plain):
    """Compiles its update for each shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(update(p, p.grad))


class NormOfAll(Plain):
    """Couples parameters by an option that its defaults don't show."""

    def __init__(self, params: Any, lr: float, together: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.together = together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in params]).norm() if self.together else 1.0
        for p in params:
            p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


def test_what_trying_finds_out() -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    for kind, verdict in (
        (Plain, Verdict.ELEMENTWISE),
        (Late, Verdict.COUPLED),
        (Switched, Verdict.ELEMENTWISE),
        (Compiled, Verdict.ELEMENTWISE),
        (torch.optim.Muon, Verdict.COUPLED),
    ):
        assert judge(kind(params, lr=0.1)) is verdict, kind
    assert compiled == []

    def together(params: Any) -> torch.optim.Optimizer:
        return NormOfAll(params, lr=0.1, together=True)

    assert couples_parameters(together(params), together)
    assert judge(together(params), together) is Verdict.COUPLED
    assert not couples_parameters(NormOfAll(params, lr=0.1))


def clipping(rank: int, world_size: int) -> Any:
    model = wrap(net(), "fsdp")
    train(model, WholeParameters(model, NormOfAll, lr=0.1, together=True), rank, world_size)
    return model.state_dict()


def test_a_norm_over_all_parameters() -> None:
    plain = net()
    train(plain, NormOfAll(plain.parameters(), lr=0.1, together=True))
    assert difference(rank_pool(3, "simulated").run(clipping, 3)[1], plain.state_dict()) <= 1e-9


def names(optimizer: WholeParameters) -> list[list[str]]:
    return [g["param_names"] for g in optimizer.param_groups]


def test_who_takes_which_parameters() -> None:
    model = net()
    matrices, rest = ["0.weight", "2.weight", "4.weight"], ["0.bias", "3.weight", "3.bias", "4.bias"]
    assert names(WholeParameters(model, torch.optim.Muon, lr=0.1)) == [matrices, rest]
    assert names(WholeParameters(model, torch.optim.SGD, lr=0.1)) == [
        [n for n, _ in model.named_parameters()]
    ]
    rules: list[Any] = [
        (["3", "0.bias"], torch.optim.SGD, {"lr": 0.3}),
        ("*.weight", torch.optim.Muon, {"lr": 0.2}),
    ]
    optimizer = WholeParameters(model, rules, rest=(torch.optim.Adam, {"lr": 0.5}))
    assert names(optimizer) == [["0.bias", "3.weight", "3.bias"], matrices, ["4.bias"]]
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.2, 0.5]
    assert [type(o).__name__ for o in optimizer.optimizers] == ["SGD", "Muon", "Adam"]
    with pytest.raises(ConfigurationError, match="no parameter is called"):
        optimizer.owner_of("nobody")
    with pytest.raises(ValueError, match="2D"):  # takes none of them: its own words
        WholeParameters(nn.LayerNorm(3), torch.optim.Muon, lr=0.1)


def test_costs() -> None:
    matrix = torch.Size([4, 10])
    assert cost_of(torch.optim.Muon, matrix) == cost_of(torch.optim.Muon, torch.Size([10, 4])) == 160
    assert cost_of(torch.optim.Adafactor, matrix) == 40
    assert cost_of(torch.optim.Muon, torch.Size([10])) == 10


class _Counted(nn.Module):
    """Has parameters that no gradient is possible of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.table = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.table.sum(0) * self.mask


@on_ranks((2, "simulated"))
def test_integers_among_the_parameters(rank: int) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    for shard in (fully_shard, FSDP):
        models = _Counted(), shard(_Counted())  # type: ignore[operator]
        for model in models:
            optimizer = WholeParameters(model, torch.optim.Muon, lr=0.1)
            for _ in range(2):
                model.zero_grad()
                xs = torch.cat(
                    [torch.randn(2, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
                )
                model(xs if model is models[0] else x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())
        with pytest.raises(
            ConfigurationError, match=r"LBFGS adds steps to .*, which has integers: make it a buffer"
        ):
            WholeParameters(models[1], torch.optim.LBFGS, lr=0.1)


# ------------ What a step sends, counted: what theory says, in one all-to-all each way, and nothing for
# element-wise optimizers.
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
