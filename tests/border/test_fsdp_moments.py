"""What programs do with an FSDP module outside of its own forward: it is right, or refused by name on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, PrecisionPolicy
from shardkit.errors import LifecycleError
from tests.beside import assert_same, train_beside
from tests.border.strategies import OPTIONS, Net, wrap
from tests.doors import through
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import on_ranks

THERE = "inside of summon_full_params, or through a forward that was run there, is not possible"


# ------------------------------------------------------------------ inside of summon_full_params
def _trained_inside(model: Any, x: torch.Tensor) -> None:
    with pytest.raises(LifecycleError, match=THERE):
        model(x).sum().backward()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(1, 2, (3, "simulated"))
def test_evaluation_on_one_rank_when_summoned(rank: int, options: dict[str, Any]) -> None:
    """Rank 0 alone runs forward, generate and the wrapped module; others go on to a barrier and to training."""
    model = wrap(build(Net), **options)
    x = batch(0, 1)[0]
    model.train()(x).sum().backward()
    expected = model.eval()(x)
    before = model.state_dict()
    with model.summon_full_params():
        if rank == 0:
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    assert torch.equal(model(x), expected)
            if "precision" not in options:  # the wrapped module's own forward casts nothing
                with torch.no_grad():
                    once = torch.cat([expected, expected], 1)
                    assert torch.equal(model.generate(x), torch.cat([model(once), model(once)], 1))
            _trained_inside(model, x)
    model._state.group.barrier(label="after evaluation")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.train()(x).sum().backward()


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["unflattened"]])
@on_ranks(1, 2, (3, "simulated"))
def test_graphs_and_summon(rank: int, options: dict[str, Any]) -> None:
    """A graph from before is as good as ever, unless parameters were changed; one from inside is refused."""
    plain, model = build(Net).eval(), wrap(build(Net), **options).eval()
    world = model._state.group.world_size
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(2):
        xs = batch(step, world)
        first.zero_grad()
        second.zero_grad()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        loss = model(xs[rank]).pow(2).mean()
        assert_same(model, plain)
        loss.backward()
        first.step()
        second.step()
    assert_same(model, plain)
    with model.summon_full_params():
        inside, past = (m(xs[rank]).sum() for m in (model, model.module))
        with pytest.raises(LifecycleError, match=THERE):
            inside.backward(retain_graph=True)
    with pytest.raises(LifecycleError, match=THERE):
        inside.backward()
    gone: Any = (
        (RuntimeError, "modified by an inplace") if world == 1 else (LifecycleError, "and not gathered now")
    )
    for graph in (past, _squared(model)):
        with pytest.raises(gone[0], match=gone[1]):
            graph.backward()
    loss = model(xs[rank]).sum()
    with model.summon_full_params(), torch.no_grad():
        model.module.head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(xs[rank]).sum().backward()


def _squared(model: Any) -> torch.Tensor:
    """Saves a parameter of the root's for backward, past the FSDP module."""
    with model.summon_full_params():
        return model.module.head.weight.pow(2).sum()


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@on_ranks(1, 2, (3, "simulated"))
def test_changes_when_summoned(rank: int, compute: torch.dtype | None) -> None:
    model = wrap(build(Net), precision=PrecisionPolicy(compute=compute, buffers=compute)).eval()
    x = batch(0, 1)[0]
    with torch.no_grad():
        with model.summon_full_params():
            model.module.head.weight.mul_(2.0)
            model.module.head.bias.data = torch.zeros(3)
            model.module.block.module[0].weight.fill_(0.1)
            inside = model(x)
        assert torch.equal(model(x), inside)
        assert model.state_dict()["block.0.weight"].eq(0.1).all()


# ------------------------------------------------------------------ methods other than forward
@on_ranks(1, 2, (3, "simulated"))
def test_methods_other_than_forward(rank: int) -> None:
    model = wrap(build(Net)).eval()
    x = batch(0, 1)[0]
    with torch.no_grad():
        expected = model(x)
        if model._state.group.world_size > 1:
            with pytest.raises(LifecycleError, match=r"parameter 'head\.weight'"):
                model.module(x)
        assert torch.equal(model(x), expected)
    other = wrap(build(Net))
    if model._state.group.world_size == 1:  # values are there, but nobody would hand gradients over
        with pytest.raises(
            LifecycleError, match=r"'head\.\w+', but the FSDP module that holds it was never called"
        ):
            other.module.head(torch.ones(2, 5)).sum().backward()


class Encoder(nn.Module):
    """The guide's model: torch's fast path would read the layers' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x))


@pytest.mark.parametrize("parts", [("linear1", "linear2", "norm1"), ("self_attn",), ("norm2", "self_attn")])
@on_ranks(1, 2, (3, "simulated"))
def test_paths_past_the_modules(rank: int, parts: tuple[str, ...]) -> None:
    plain = build(Encoder).eval()
    model: Any = build(Encoder)
    for layer in model.encoder.layers:
        for name in parts:
            layer.set_submodule(name, FSDP(layer.get_submodule(name)))
    model = FSDP(model).eval()
    x = batch(0, 1, 6)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))


# ------------------------------------------------------------------ outputs that are parameters
@dataclass
class Held:
    weight: torch.Tensor


class Lends(nn.Module):
    """Returns its weight for somebody else to use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        views = {"itself": self.weight, "view": self.weight[1:], "detached": self.weight.detach()}
        if self.how == "held":
            return x * 2, Held(self.weight)
        return x * 2, {"weight": views[self.how]}


class Borrows(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lends, self.layer = Lends(how), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, found = self.lends(x)
        return self.layer(torch.tanh(x)) @ found["weight"].t()


@pytest.mark.parametrize("how", ["itself", "view", "detached", "held"])
@on_ranks(1, 2, (3, "simulated"))
def test_outputs_that_are_parameters(rank: int, how: str) -> None:
    plain, model = build(lambda: Borrows(how)), through("FSDP", build(lambda: Borrows(how)), "lends")
    world = model._state.group.world_size
    if how == "held":
        if world > 1:
            with pytest.raises(
                LifecycleError, match="'lends' returns a parameter, or a view of one, inside a tuple"
            ):
                model(batch(0, 1)[0])
        return
    for step in range(3):
        xs = batch(step, world)
        with torch.no_grad():
            torch.testing.assert_close(model(xs[0]), plain(xs[0]))
        train_beside(rank, world, model, plain, lambda m, r, _, xs=xs: m(xs[r]).pow(2).mean(), steps=[step])


class Balanced(nn.Module):
    """Keeps losses made of its outputs, as routers and codebooks do, and for some batches what it computed before."""

    def __init__(self, width: int = 600) -> None:  # too large to travel with others
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(x)
        self.hidden = hidden if hidden.mean() > 0 else None
        outputs = torch.tanh(self.layer(hidden))
        self.size = (outputs * self.scale).square().mean()
        self.more = {"spread": (outputs.std(0) * self.scale).mean()}
        return outputs


def _with_kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    return loss + sum(m.size + m.more["spread"] for m in model.modules() if isinstance(m, Balanced))


@on_ranks(2)
def test_losses_that_modules_keep(rank: int) -> None:
    """Backward came to such a loss before the unit's outputs, where parameters had no memory, and ended the process.

    What a unit computed before, and keeps on some ranks alone, gathers nothing again.
    """
    for door in ("FSDP", "fully_shard"):
        plain, model = (
            build(lambda: nn.Sequential(nn.Linear(WIDTH, 600), Balanced(), Balanced(), nn.Linear(600, 2)))
            for _ in range(2)
        )
        model = through(door, model, "0", "1", "2", "3")
        train_beside(rank, 2, model, plain, lambda m, r, step: _with_kept(m, batch(step, 2)[r]))


# ------------------------------------------------------------------ threads
class Meets(nn.Module):
    """Lets another thread in while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.meanwhile: list[Callable[[], Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meanwhile:
            other = threading.Thread(target=self.meanwhile.pop(), name="other")
            other.start()
            other.join()
        return _Interrupted.apply(self.layer(x), self)


class _Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Meets) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for action in ctx.module.meanwhile:
            other = threading.Thread(target=action, name="other")
            other.start()
            other.join()
        return gradient, None


@pytest.mark.parametrize("during", ["forward", "backward"])
@on_ranks(2, 3)
def test_another_thread_is_refused(rank: int, during: str) -> None:
    """Nothing of the first thread's is freed by it: what is in progress comes out right."""
    plain, inner = build(Meets), build(Meets)
    model = FSDP(inner)
    x = batch(0, 1)[0]
    errors: list[BaseException] = []
    kept = model(x).sum()  # its backward may be tried by the other thread
    attempts: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(x),
        "backward": kept.backward,
        "summon_full_params": model.state_dict,
    }

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except LifecycleError as error:
            errors.append(error)

    for name, action in attempts.items():
        del errors[:]
        loss = None if during == "forward" else model(x).sum()
        inner.meanwhile[:] = [lambda action=action: attempt(action)]
        if loss is None:
            loss = model(x).sum()
        else:
            model.zero_grad()
            loss.backward()
        inner.meanwhile.clear()
        torch.testing.assert_close(loss, plain(x).sum())
        assert len(errors) == 1, name
        assert "thread" in str(errors[0]) or "inside of forward or backward" in str(errors[0])
    plain(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    gradient = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    mine = next(model.parameters()).grad  # its part of the mean; all ranks had the same batch
    size = mine.numel()
    truth = nn.functional.pad(gradient, (0, size * model._state.group.world_size - gradient.numel()))
    torch.testing.assert_close(mine.view(-1), truth[rank * size : (rank + 1) * size])
