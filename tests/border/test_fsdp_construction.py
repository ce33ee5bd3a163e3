"""How FSDP modules are made, filled and called in ways of torch's: right, or refused by name on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP
from shardkit.errors import ConfigurationError, LifecycleError
from tests.beside import assert_same
from tests.border.strategies import OPTIONS, Net, wrap
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import on_ranks


# ------------------------------------------------------------------ construction
class Named(nn.Module):
    """Has something by the name under which shards are listed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.flat_param_0: Any
        if kind == "parameter":
            self.flat_param_0 = nn.Parameter(torch.full((WIDTH,), 0.5))
        elif kind == "buffer":
            self.register_buffer("flat_param_0", torch.full((WIDTH,), 0.5))
        elif kind == "module":
            self.flat_param_0 = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        found = self.flat_param_0
        return found(y) if isinstance(found, nn.Module) else y * found


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
@on_ranks(1, 2, (3, "simulated"))
def test_names_of_shards_that_are_taken(rank: int, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Named has an attribute 'flat_param_0'.*flatten=False"):
        FSDP(build(lambda: Named(kind)))
    plain, model = build(lambda: Named(kind)), FSDP(build(lambda: Named(kind)), flatten=False)
    x = batch(0, 1)[0]
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for m, optimizer in ((plain, first), (model, second)):
        m(x).pow(2).sum().backward()
        optimizer.step()
    assert_same(model, plain)
    model.load_state_dict(plain.state_dict())
    model.load_local_state_dict(model.local_state_dict())
    assert_same(model, plain)


@pytest.mark.parametrize("on_rank", [None, 0])
@on_ranks(1, 2, 3)
def test_lazy_modules(rank: int, world_size: int, on_rank: int | None) -> None:
    """Refused on all ranks, also if one of them knows the shapes; right once they are known."""
    if world_size == 1 and on_rank == 0:
        return  # it knows all
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 2))
    x = batch(0, 1)[0]
    if on_rank == rank:
        model(x)
    match = "no shape before their module's first forward" if on_rank is None else "no shape yet|differ|has"
    with pytest.raises((ConfigurationError, RuntimeError), match=match):
        FSDP(model)
    if on_rank != rank:
        model(x)
    expected = model.eval()(x)
    torch.testing.assert_close(FSDP(model)(x), expected)


@on_ranks(1, 2, 3)
def test_a_forward_without_values(rank: int) -> None:
    """Without values: shapes can be inferred, values can't; ``to_empty`` and loading make it a model."""
    truth = build(Net).eval()
    with torch.device("meta"):
        model = wrap(Net()).eval()
    x = batch(0, 1)[0]
    assert model(x.to("meta")).shape == (4, 3)
    with pytest.raises(
        LifecycleError, match=r"parameter '\S*weight', which is on the meta device .* to_empty\(\)"
    ):
        model(x)
    model.to_empty(device="cpu")
    model.load_state_dict(truth.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), truth(x))


# ------------------------------------------------------------------ other ways to give or take parameters
@on_ranks(1, 2, (3, "simulated"))
def test_functional_call(rank: int) -> None:
    model = wrap(build(Net)).eval()
    x = batch(0, 1)[0]
    expected = model(x)
    call = torch.func.functional_call
    assert torch.equal(call(model, dict(model.named_parameters()), (x,)), expected)
    others = {k: v.detach() * 2 for k, v in model.named_parameters()}
    with pytest.raises(LifecycleError, match="there is another Tensor, which forward would ignore"):
        call(model, others, (x,))
    assert torch.equal(model(x), expected)
    unit = model.block._fsdp_wrapped_module
    unit.flat_param_0 = nn.Parameter(unit.flat_param_0.detach() * 2)
    with pytest.raises(LifecycleError, match=r"parameters 0 of block, unit \d+\) there is another"):
        model(x)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["unflattened"]])
@on_ranks(1, 2, (3, "simulated"))
def test_load_state_dict_assign(rank: int, options: dict[str, Any]) -> None:
    plain, model = build(Net, 1), wrap(build(Net), **options)
    assert not model.load_state_dict(plain.state_dict(), assign=True).missing_keys
    assert_same(model, plain)
    x = batch(0, 1)[0]
    for m in (plain, model):
        m(x).pow(2).sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert_same(model, plain)


class Counted(nn.Module):
    """A function for ``apply`` that notes what it was given, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __call__(self, module: nn.Module) -> None:
        self.seen.append(type(module).__name__)
        if hasattr(module, "weight"):
            nn.init.normal_(module.weight)
        if hasattr(module, "bias"):
            nn.init.uniform_(module.bias)


@on_ranks(1, 2, (3, "simulated"))
def test_apply_initializes_once(rank: int) -> None:
    plain, model = build(Net), wrap(build(Net))
    mine, truth = Counted(), Counted()
    torch.manual_seed(3)
    assert plain.apply(truth) is plain
    torch.manual_seed(3)
    assert model.apply(mine) is model
    assert mine.seen == truth.seen
    assert_same(model, plain)
    outer, truth = nn.Sequential(wrap(build(Net))), Counted()
    torch.manual_seed(3)
    outer.apply(truth)
    assert truth.seen == [*mine.seen, "Sequential"]
    assert_same(outer[0], plain)


@on_ranks(2)
def test_memory_given_to_numpy_stays_with_it(rank: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    plain, model = copy.deepcopy(linear), FSDP(linear)
    taken: list[Any] = []
    linear.register_forward_hook(lambda m, args, out: taken.append(m.weight.detach().numpy()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        before = plain.weight.detach().clone()
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(torch.from_numpy(taken[-1]), before)
    torch.testing.assert_close(model.state_dict()["weight"], plain.weight.detach())
