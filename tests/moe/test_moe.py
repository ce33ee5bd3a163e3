"""Mixture of experts over ranks against one process that holds all experts and computes every rank's tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, OutOfStepError, RankMismatchError
from shardkit.model_parallel.moe import top2gating
from shardkit.nn.moe import MOELayer, Top2Gate
from tests.pools import on_ranks, rank_pool, run_once


def expert_of(number: int, dim: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)).to(dtype)


def gate_of(dim: int, experts: int, dtype: torch.dtype) -> Top2Gate:
    torch.manual_seed(7)
    return Top2Gate(dim, experts).to(dtype)


def inputs_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()


def weights_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


# ------------------------------------------------------------------------------------------ gating
def slow_gating(logits: torch.Tensor, noise: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Algorithm 1 of the paper, token by token (with the second expert drawn): l_aux and [S, E, C]."""
    tokens, experts = logits.shape
    capacity = -(-2 * tokens // experts)
    gates = torch.softmax(logits, dim=1)
    first = [int(row.argmax()) for row in gates]
    second = []
    for s in range(tokens):
        row = (logits + noise)[s].clone()
        row[first[s]] = -torch.inf
        second.append(int(row.argmax()))
    taken = [0] * experts
    weights = torch.zeros(tokens, experts, capacity, dtype=logits.dtype)
    for choice in (first, second):
        for s, e in enumerate(choice):
            if taken[e] < capacity:
                weights[s, e, taken[e]] += gates[s, e]
            taken[e] += 1
    share = weights.sum(dim=(1, 2), keepdim=True)
    share[share == 0] = 1
    counts = torch.bincount(torch.tensor(first), minlength=experts) / tokens
    return float((counts * gates.mean(dim=0)).mean()), weights / share


@pytest.mark.parametrize(("tokens", "experts"), [(8, 4), (6, 2), (7, 3), (5, 1), (1, 4), (6, 6)])
def test_gating(tokens: int, experts: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        logits = (3 * torch.randn(tokens, experts, dtype=torch.float64)).requires_grad_()
        torch.manual_seed(seed)
        noise = torch.distributions.Gumbel(0.0, 1.0).sample(torch.Size((tokens, experts)))
        torch.manual_seed(seed)
        l_aux, combine, mask = top2gating(logits)
        aux, weights = slow_gating(logits.detach(), noise)
        torch.testing.assert_close(combine.detach(), weights, rtol=1e-9, atol=1e-12)
        assert l_aux.item() == pytest.approx(aux)
        assert torch.equal(mask, weights > 0)
        assert int(mask.sum(dim=0).max()) <= 1, "two tokens in one slot"

        def weighed(x: torch.Tensor, seed: int = seed) -> torch.Tensor:
            torch.manual_seed(seed)
            l_aux, combine, _ = top2gating(x)
            return l_aux + (combine * weights_of(tuple(combine.shape), x.dtype)).sum()

        assert torch.autograd.gradcheck(weighed, (logits,))


def test_gating_keeps_the_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        l_aux, combine, mask = top2gating(torch.randn(4, 2).to(dtype))
        assert (l_aux.dtype, combine.dtype, mask.dtype) == (dtype, dtype, torch.bool)
    for shape in ((0, 3), (3, 0), (3,)):
        with pytest.raises(ConfigurationError, match=r"tokens, experts"):
            top2gating(torch.zeros(shape))


# ------------------------------------------------------------------------------------------ the layer
def together(
    world: int, local: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[Any], list[list[torch.Tensor]]]:
    """Each rank's output, gradients of its input and gate, and those of all experts: expert by expert, slot by slot."""
    dim = shape[-1]
    experts = [expert_of(e, dim, dtype) for e in range(world * local)]
    outputs, local_gradients = [], []
    for rank in range(world):
        gate = gate_of(dim, world * local, dtype)
        x = inputs_of(rank, shape, dtype)
        torch.manual_seed(rank)
        l_aux, combine, mask = gate(x.view(-1, dim))
        rows = []
        for s, token in enumerate(x.view(-1, dim)):
            row = torch.zeros(dim, dtype=dtype)
            for e, c in mask[s].nonzero().tolist():
                row = row + combine[s, e, c] * experts[e](token)
            rows.append(row)
        y = torch.stack(rows).view(shape)
        (l_aux + (y * weights_of(shape, dtype)).sum()).backward()
        outputs.append(y.detach())
        assert gate.wg.weight.grad is not None
        local_gradients.append((x.grad, gate.wg.weight.grad))
    return outputs, local_gradients, [[p.grad for p in e.parameters()] for e in experts]  # type: ignore[misc]


def apart(
    rank: int, world: int, local: int, shape: tuple[int, ...], dtype: torch.dtype, calls: int = 1
) -> Any:
    dim = shape[-1]
    experts: Any = nn.ModuleList(expert_of(rank * local + k, dim, dtype) for k in range(local))
    if local == 1:
        experts = experts[0]
    layer = MOELayer(gate_of(dim, world * local, dtype), experts)
    assert all(p.expert for p in experts.parameters())
    assert not hasattr(layer.gate.wg.weight, "expert")
    assert (layer.world_size, layer.num_local_experts) == (world, local)
    for _ in range(calls):
        layer.zero_grad()
        x = inputs_of(rank, shape, dtype)
        torch.manual_seed(rank)
        y = layer(x)
        (layer.l_aux + (y * weights_of(shape, dtype)).sum()).backward()
    copied = copy.deepcopy(layer)  # with its group, and what forward left
    torch.manual_seed(rank)
    assert torch.equal(copied(x), y)
    return y.detach(), (x.grad, layer.gate.wg.weight.grad), [p.grad for p in experts.parameters()]


CASES = [  # experts of a rank, shape of the input, dtype
    (1, (2, 6, 4), torch.float64),
    (2, (3, 4, 4), torch.float64),
    (3, (5, 1, 2), torch.float64),  # uneven: 5 tokens over 6 or 9 experts
    (1, (3, 3, 4), torch.float32),
    (2, (2, 6, 4), torch.bfloat16),
    (1, (2, 6, 4), torch.float16),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_layer(world: int) -> None:
    for local, shape, dtype in CASES:
        outputs, gradients, experts = together(world, local, shape, dtype)
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 3e-2)
        for rank, result in enumerate(rank_pool(world).run(apart, world, local, shape, dtype, 2)):
            own = [g for e in experts[rank * local : (rank + 1) * local] for g in e]
            own = [torch.zeros_like(r) if g is None else g for g, r in zip(own, result[2], strict=True)]
            expected = (outputs[rank], gradients[rank], own)
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_layer_on_other_backends() -> None:
    # threads share torch's generator: a gate without noise
    def quiet(rank: int) -> torch.Tensor:
        layer = MOELayer(
            QuietGate(4, 4), nn.ModuleList(expert_of(2 * rank + k, 4, torch.float32) for k in range(2))
        )
        y: torch.Tensor = layer(inputs_of(rank, (2, 4, 4), torch.float32))
        y.sum().backward()
        return y.detach()

    seen = get_backend("simulated").launch(quiet, 2, timeout=400)
    for rank, y in enumerate(seen):
        x = inputs_of(rank, (2, 4, 4), torch.float32).view(-1, 4)
        expected = torch.stack([expert_of(s % 4, 4, torch.float32)(token) for s, token in enumerate(x)])
        torch.testing.assert_close(y.view(-1, 4), expected.detach())


class QuietGate(nn.Module):
    """Token s goes to expert s modulo E."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = torch.arange(len(tokens), device=tokens.device)
        slots = len(tokens) // self.experts
        where = (
            F.one_hot(numbers % self.experts, self.experts)[:, :, None]
            * F.one_hot(numbers // self.experts, slots)[:, None]
        )
        return tokens.sum() * 0, where.to(tokens.dtype), where.bool()


# ------------------------------------------------------------------------------------------ training
def _train(rank: int) -> list[torch.Tensor]:
    """Mean loss over ranks: everything but experts is averaged, experts are divided; see the note in the layer."""
    experts = nn.ModuleList(expert_of(2 * rank + k, 4, torch.float64) for k in range(2))
    layer = MOELayer(gate_of(4, 4, torch.float64), experts)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        x = inputs_of(10 * step + rank, (2, 6, 4), torch.float64)
        torch.manual_seed(10 * step + rank)
        ((layer(x) - 1).pow(2).mean() + 0.1 * layer.l_aux).backward()
        for p in layer.parameters():
            assert p.grad is not None
            if not hasattr(p, "expert"):
                dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return [p.detach() for p in layer.gate.parameters()] + [p.detach() for p in experts.parameters()]


def test_training() -> None:
    gate = gate_of(4, 4, torch.float64)
    experts = [expert_of(e, 4, torch.float64) for e in range(4)]
    params = [*gate.parameters(), *(p for e in experts for p in e.parameters())]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            x = inputs_of(10 * step + rank, (2, 6, 4), torch.float64).view(-1, 4)
            torch.manual_seed(10 * step + rank)
            l_aux, combine, _ = gate(x)
            y = torch.stack([e(x) for e in experts], dim=1)  # [S, E, M]
            out = (combine.sum(dim=2).unsqueeze(2) * y).sum(dim=1)
            (((out - 1).pow(2).mean() + 0.1 * l_aux) / 2).backward()
        optimizer.step()
    for rank, result in enumerate(rank_pool(2).run(_train)):
        expected = [
            *gate.parameters(),
            *(p for e in experts[2 * rank : 2 * rank + 2] for p in e.parameters()),
        ]
        torch.testing.assert_close(result, [p.detach() for p in expected])


def _groups(rank: int) -> torch.Tensor | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    place = dist.get_rank(group)
    layer = MOELayer(QuietGate(4, 2), expert_of(place, 4, torch.float32), group)
    assert layer.group is group
    y: torch.Tensor = layer(inputs_of(place, (1, 4, 4), torch.float32))
    return y.detach()


def test_a_group_of_some_ranks() -> None:
    results = rank_pool(3).run(_groups)
    for place, rank in enumerate((0, 2)):
        x = inputs_of(place, (1, 4, 4), torch.float32).view(-1, 4)
        expected = torch.stack([expert_of(s % 2, 4, torch.float32)(token) for s, token in enumerate(x)])
        torch.testing.assert_close(results[rank].view(-1, 4), expected.detach())


# ------------------------------------------------------------------------------------------ wrong calls
@on_ranks(2)
def test_wrong_calls(rank: int) -> None:
    def layer(experts: int = 2, local: int = 1) -> MOELayer:
        made = nn.ModuleList(expert_of(k, 4, torch.float32) for k in range(local))
        return MOELayer(gate_of(4, experts, torch.float32), made)

    with pytest.raises(RankMismatchError, match="equally many tokens"):
        layer()(torch.ones(1, 4 + 2 * rank, 4))
    with pytest.raises(RankMismatchError, match="experts of a rank"):
        layer(local=1 + rank)(torch.ones(1, 4, 4))
    other = layer().to(torch.float64 if rank else torch.float32)
    with pytest.raises(RankMismatchError, match="dtype"):
        other(torch.ones(1, 4, 4).to(other.gate.wg.weight))
    with pytest.raises(ConfigurationError, match="make the gate for that many"):
        layer(experts=3)(torch.ones(1, 6, 4))
    for bad in ((torch.ones(4, 4),), (torch.ones(1, 4, 4), torch.ones(1, 4, 4))):
        with pytest.raises(ConfigurationError, match="one input"):
            layer()(*bad)
    with pytest.raises(ConfigurationError, match="empty"):
        MOELayer(gate_of(4, 2, torch.float32), nn.ModuleList())
    with pytest.raises(ConfigurationError, match="keep the shape"):
        MOELayer(gate_of(4, 2, torch.float32), nn.Linear(4, 3))(torch.ones(1, 4, 4))


def _only_one_changes(rank: int) -> str:
    layer = MOELayer(gate_of(4, 2, torch.float32), expert_of(0, 4, torch.float32))
    layer(torch.ones(1, 4, 4))
    try:
        layer(torch.ones(1, 4 + 2 * rank, 4))
    except OutOfStepError as error:
        return str(error)
    return ""


def test_inputs_that_change_on_one_rank() -> None:
    for message in run_once(2, "gloo", _only_one_changes):
        assert "inputs of a mixture of experts (all ranks need equally many tokens" in message
        assert "tokens of experts" in message


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="no process group"):
        MOELayer(gate_of(4, 2, torch.float32), expert_of(0, 4, torch.float32))
