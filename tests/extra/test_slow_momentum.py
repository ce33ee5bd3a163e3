"""LocalSGD, slow momentum and gossip on real ranks against a simulation of the algorithms in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.backend import get_backend
from shardkit.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from shardkit.experimental.nn.data_parallel.gossip import (
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    MixingManager,
    NPeerDynamicDirectedExponentialGraph,
    PushSum,
    RingGraph,
)
from tests.backends.environments import environments
from tests.pools import on_ranks, rank_pool

LR = (0.1, 0.03)  # of two parameter groups


class Uneven(MixingManager):
    """Keeps more than it sends, and node 0 even more: averages have a bias that push-sum weights take away."""

    def is_uniform(self) -> bool:
        return False

    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        peers, _ = self.graph_manager.get_peers()
        kept = 0.7 if self.graph_manager.rank == 0 else 0.4
        sent = (1 - kept) / len(peers)
        weights: dict[str | int, torch.Tensor] = {"lo": torch.tensor([kept])}
        weights.update({p: torch.tensor([sent / kept if residual_adjusted else sent]) for p in peers})
        return weights


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 2, bias=False)
    )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": others, "lr": LR[0]}, {"params": [first], "lr": LR[1]}], momentum=0.9)


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4 + rank, 3, generator=generator)
    return model(x.to(next(model.parameters()).device)).pow(2).mean()


def _schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group, lr in zip(optimizer.param_groups, LR, strict=True):
        group["lr"] = lr / (1 + step)


# ------------------------------------------------------------------------------------------ the algorithms
def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.detach() for t in tensors]).mean(0)


def _simulate(world: int, node: int, steps: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Parameters of each rank's model after each step, from the papers; models of a node are one model."""
    nodes = world // node
    models = [_model(0) for _ in range(nodes)]
    optimizers = [_optimizer(m) for m in models]
    rows = [list(m.parameters()) for m in models]
    beta, alpha = options.get("slowmo_momentum", 0.5), options.get("slowmo_lr", 1.0)
    outer = {id(p): p.detach().clone() for p in rows[0]}
    velocity = {key: torch.zeros_like(p) for key, p in outer.items()}
    history = []
    for step in range(steps):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _schedule(optimizer, step)
            optimizer.zero_grad()
            ranks = range(i * node, (i + 1) * node)
            (sum(_loss(model, rank, step) for rank in ranks) / node).backward()
            optimizer.step()
        slow = (beta, alpha) != (0, 1) and (step + 1) % options["slowmo_frequency"] == 0
        if slow or (step + 1) % options["localsgd_frequency"] == 0:
            for same in zip(*rows, strict=True):
                mean = _mean(list(same))
                for p in same:
                    p.data.copy_(mean)
        if slow:
            rates = {id(p): g["lr"] for g in optimizers[0].param_groups for p in g["params"]}
            for i, p in enumerate(rows[0]):
                u, x0, lr = velocity[id(p)], outer[id(p)], rates[id(p)]
                u.copy_(beta * u + (x0 - p.data) / lr)
                x0.copy_(x0 - alpha * lr * u)
                for row in rows:
                    row[i].data.copy_(x0)
        history.append([p.detach().clone() for p in rows[0]])
    return history


def _train(
    rank: int, node: int, steps: int, options: dict[str, Any], backend: str
) -> list[list[torch.Tensor]]:
    model = _model(rank).to(get_backend(backend).device())  # rank 0's counts
    net = SlowMoDistributedDataParallel(model, nprocs_per_node=node, **options)
    optimizer = _optimizer(net.module)
    history = []
    for step in range(steps):
        _schedule(optimizer, step)
        net.zero_grad()
        _loss(net, rank, step).backward()
        optimizer.step()
        net.perform_slowmo(optimizer)
        history.append([p.detach().cpu().clone() for p in net.module.parameters()])
    return history


def _compare(rank: int, world: int, node: int, options: dict[str, Any], backend: str = "gloo") -> None:
    mine, truth = _train(rank, node, 8, options, backend), _simulate(world, node, 8, options)
    together = [
        s
        for s in range(8)
        if node == world
        or (s + 1) % options["slowmo_frequency"] == 0
        or (s + 1) % options["localsgd_frequency"] == 0
    ]
    assert together
    for step in together if rank else range(8):  # rank 0's own way is the simulation's as well
        for got, expected in zip(mine[step], truth[step], strict=True):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("world", "node", "options"),
    [
        (2, 1, {"slowmo_frequency": 4, "localsgd_frequency": 2}),
        (2, 1, {"slowmo_frequency": 4, "localsgd_frequency": 2, "slowmo_memory_efficient": False}),
        (2, 1, {"slowmo_frequency": 4, "localsgd_frequency": 3, "slowmo_lr": 0.7, "slowmo_momentum": 0.2}),
        (3, 1, {"slowmo_frequency": 3, "localsgd_frequency": 2, "slowmo_memory_efficient": False}),
        (3, 1, {"slowmo_frequency": 2, "localsgd_frequency": 2, "slowmo_num_shards": 2}),
        (2, 1, {"slowmo_frequency": 3, "localsgd_frequency": 3, "slowmo_momentum": 0, "slowmo_lr": 1}),
        (2, 2, {"slowmo_frequency": 3, "localsgd_frequency": 2}),
    ],
)
def test_local_sgd_and_slow_momentum(world: int, node: int, options: dict[str, Any]) -> None:
    rank_pool(world).run(_compare, world, node, options)


@pytest.mark.parametrize(
    ("backend", "world"), [p for p in environments("simulated", "xla") if p.values[1] in (2, 3)]
)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_on_other_backends(backend: str, world: int, memory_efficient: bool) -> None:
    options = {"slowmo_frequency": 4, "localsgd_frequency": 2, "slowmo_memory_efficient": memory_efficient}
    rank_pool(world, backend).run(_compare, world, 1, options, backend)


def test_nodes_of_several_ranks() -> None:
    options = {"slowmo_frequency": 4, "localsgd_frequency": 2}
    rank_pool(4).run(_compare, 4, 2, options)


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_fp32_copies(rank: int, flat: bool) -> None:
    """fp16 parameters with fp32 copies, which the optimizer steps and which are averaged."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    net = SlowMoDistributedDataParallel(model, 1, slowmo_frequency=2, localsgd_frequency=1)
    start = torch.cat([p.detach().float().view(-1) for p in model.parameters()])
    if flat:
        copies: Any = start.clone().requires_grad_()
    else:
        copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD([copies] if flat else copies, lr=0.5)
    for step in range(1, 3):
        for c in [copies] if flat else copies:
            c.grad = torch.full_like(c, float(rank + step))
        optimizer.step()
        net.perform_slowmo(optimizer, fp32_params={torch.float32: copies} if flat else copies)
    # means of the gradients: 1.5 and 2.5; the first slow step adds no momentum
    expected = start - 0.5 * (1.5 + 2.5)
    got = copies if flat else torch.cat([c.view(-1) for c in copies])
    torch.testing.assert_close(got.detach(), expected)
    params = torch.cat([p.detach().view(-1) for p in model.parameters()])
    torch.testing.assert_close(params, expected.half())


@on_ranks(2)
def test_parameters_without_gradients_on_some_ranks(rank: int) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if rank == 0 else self.b(x)

    net = SlowMoDistributedDataParallel(Choice(), 2)
    net(torch.ones(1, 2)).sum().backward()
    assert net.module.a.weight.grad.tolist() == net.module.b.weight.grad.tolist() == [[0.5, 0.5]] * 2
    assert net.module.c.weight.grad is None


# ------------------------------------------------------------------------------------------ gossip
GRAPHS = {
    "ring": (RingGraph, 1),
    "exponential": (DynamicDirectedExponentialGraph, 1),
    "two peers": (NPeerDynamicDirectedExponentialGraph, 2),
    "bipartite exponential": (DynamicBipartiteExponentialGraph, 1),
    "bipartite linear": (DynamicBipartiteLinearGraph, 1),
    "linear": (DynamicDirectedLinearGraph, 1),
}


def _gossip(rank: int, world: int, name: str, uneven: bool, memory_efficient: bool) -> list[Any]:
    kind, peers = GRAPHS[name]
    graph = kind(rank, world, peers_per_itr=peers)
    net = SlowMoDistributedDataParallel(
        nn.Linear(1, 1, bias=False),
        1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP,
        slowmo_momentum=0.5 if memory_efficient else 0.0,
        slowmo_frequency=5,
        graph=graph,
        mixing=Uneven(graph, None) if uneven else None,
    )
    x = torch.tensor([float(rank) ** 2])
    with torch.no_grad():
        net.module.weight.fill_(x.item())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(12):
        net(torch.zeros(1, 1)).sum().backward()  # no gradient: averaging alone
        optimizer.step()
        net.perform_slowmo(optimizer)
        value = net.module.weight.item() / net.ps_weight.item()
        found.append((net.module.weight.item(), net.ps_weight.item(), value))
    return found


@pytest.mark.parametrize(
    ("name", "uneven", "world"),
    [
        ("ring", False, 2),
        ("ring", True, 3),
        ("exponential", True, 4),
        ("two peers", False, 4),
        ("linear", True, 2),
    ],
)
def test_gossip_goes_to_the_mean(name: str, uneven: bool, world: int) -> None:
    results = rank_pool(world).run(_gossip, world, name, uneven, False)
    mean = sum(r * r for r in range(world)) / world
    for step in range(12):
        assert sum(r[step][0] for r in results) == pytest.approx(world * mean, rel=1e-5)  # nothing is lost
        assert sum(r[step][1] for r in results) == pytest.approx(world, rel=1e-5)
    for result in results:
        assert result[-1][2] == pytest.approx(mean, rel=0.05)
    if uneven and world > 2:
        assert any(abs(r[-1][1] - 1) > 0.01 for r in results)


def test_slow_momentum_averages_gossip() -> None:
    results = rank_pool(3).run(_gossip, 3, "ring", True, True)
    assert len({round(r[4][0], 5) for r in results}) == 1
    assert [r[4][1] for r in results] == [1, 1, 1]


@on_ranks(2)
def test_a_gossiper_by_itself(rank: int) -> None:
    gossiper = PushSum(torch.zeros(3), RingGraph(rank, 2))
    received, weight = gossiper.mix(torch.full((3,), rank + 1.0), torch.ones(1))
    assert received.tolist() == [2.0 - rank] * 3
    assert weight.item() == 1


@on_ranks(3)
def test_stochastic_gradient_push(rank: int, world_size: int) -> None:
    """x <- mixing of (x - lr g) among this step's peers."""
    models = [_model(0) for _ in range(world_size)]
    optimizers = [_optimizer(m) for m in models]
    graphs = [NPeerDynamicDirectedExponentialGraph(r, world_size) for r in range(world_size)]
    net = SlowMoDistributedDataParallel(
        _model(0),
        1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP,
        slowmo_momentum=0.0,
        broadcast_buffers=False,
    )
    optimizer = _optimizer(net.module)
    for step in range(5):
        for r, (model, its) in enumerate(zip(models, optimizers, strict=True)):
            its.zero_grad()
            _loss(model, r, step).backward()
            its.step()
        sources = [g.get_peers(rotate=step > 0)[1] for g in graphs]
        before = [[p.detach().clone() for p in m.parameters()] for m in models]
        for r, model in enumerate(models):
            for i, p in enumerate(model.parameters()):
                p.data.copy_(_mean([before[r][i], *(before[s][i] for s in sources[r])]))
        net.zero_grad()
        _loss(net, rank, step).backward()
        optimizer.step()
        net.perform_slowmo(optimizer)
        for got, expected in zip(net.module.parameters(), models[rank].parameters(), strict=True):
            torch.testing.assert_close(got, expected)
    state = net.state_dict()
    assert state["ps_weight"].item() == 1
    keys = len(state)
    net.load_state_dict(state)
    assert len(state) == keys


# ------------------------------------------------------------------------------------------ the rest
@on_ranks(2)
def test_loading_begins_anew(rank: int) -> None:
    net = SlowMoDistributedDataParallel(_model(0), 1, slowmo_frequency=2, localsgd_frequency=2)
    assert "module.0.weight" in net.state_dict()
    optimizer = _optimizer(net.module)
    for step in range(3):
        net.zero_grad()
        _loss(net, rank, step).backward()
        optimizer.step()
        net.perform_slowmo(optimizer)
    assert net.module[1].num_batches_tracked.item() == 3
    zeros = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    net.load_state_dict(zeros)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        torch.optim.SGD(net.parameters(), lr=1).step()
        net.perform_slowmo(optimizer)
    assert all(not p.any() for p in net.parameters())  # no momentum from before


@on_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    for arguments, says in (
        ({"nprocs_per_node": 3}, "nprocs_per_node"),
        ({"nprocs_per_node": 0}, "nprocs_per_node"),
        ({"nprocs_per_node": 1, "overlap": True}, "overlap"),
        ({"nprocs_per_node": 1, "profile_mode": True}, "torch.profiler"),
        ({"nprocs_per_node": 1, "process_rank": 5}, "process_rank"),
        ({"nprocs_per_node": 1, "slowmo_base_algorithm": "gossip"}, "gossip"),
    ):
        with pytest.raises(ValueError, match=says):
            SlowMoDistributedDataParallel(_model(0), **arguments)
    graph = RingGraph(rank, 2)
    with pytest.raises(ValueError, match="biased"):
        SlowMoDistributedDataParallel(
            _model(0),
            1,
            slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP,
            slowmo_memory_efficient=False,
            graph=graph,
            mixing=Uneven(graph, None),
        )
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    net = SlowMoDistributedDataParallel(mixed, 1)
    with pytest.raises(ValueError, match="one dtype"):
        net.perform_slowmo(torch.optim.SGD(net.parameters(), lr=0.1))
    get_backend("gloo").group().barrier(label="test")
