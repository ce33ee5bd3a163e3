"""ShardedDataParallel against the single-process truth, on gloo with 2 and 3 ranks.

Tests named ``test_fairscale_...`` are cases in which fairscale 0.4.13 is wrong, hangs or raises.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import OutOfStepError
from tests.beside import assert_same
from tests.pools import rank_pool, run_once
from tests.scenarios import batch, batch_for, compare, square_loss

pytestmark = pytest.mark.parametrize("world_size", [2, 3])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 3)
    )


def run(world_size: int, build: Any, scenario: Any, **options: Any) -> None:
    rank_pool(world_size, "gloo").run(_compare, world_size, build, scenario, options)


def _compare(rank: int, world_size: int, build: Any, scenario: Any, options: dict[str, Any]) -> None:
    compare(rank, world_size, build, scenario, **options)


# ------------------------------------------------------------------ plain steps
def plain_steps(engine: Any) -> Iterator[str]:
    for step in range(3):
        engine.zero_grad("wrapper")
        engine.backward(square_loss(step))
        engine.optimizer.step()
        yield "step"


@pytest.mark.parametrize("buffer", [0, 16, 2**23])
def test_steps(world_size: int, buffer: int) -> None:
    run(world_size, mlp, plain_steps, ddp={"reduce_buffer_size": buffer})


def closures(engine: Any) -> Iterator[str]:
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            engine.zero_grad("optimizer")
            engine.backward(square_loss(step))
            with torch.no_grad():
                if hasattr(engine, "rank"):
                    return square_loss(step)(engine.inner, engine.rank)
                return torch.stack(
                    [square_loss(step)(engine.inner, r) for r in range(engine.world_size)]
                ).mean()

        engine.optimizer.step(closure)
        yield "closure"


class Double(nn.Sequential):
    """Computes in double precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def double_mlp() -> nn.Module:
    return Double(*mlp()).double()


def test_fairscale_lbfgs(world_size: int) -> None:
    """In double precision: in single, one process alone gives parameters that differ by 1e-4 from those that it gives
    when it adds up the ranks' gradients in another order, since the line search divides by differences of losses."""
    options = {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    run(world_size, double_mlp, closures, optim=torch.optim.LBFGS, options=options, tolerance=1e-11)


# ------------------------------------------------------------------ zero_grad and accumulation
@dataclasses.dataclass
class ZeroGrad:
    """Steps with one form of zero_grad."""

    form: str
    set_to_none: bool

    def __call__(self, engine: Any) -> Iterator[str]:
        for step in range(3):
            engine.zero_grad(self.form, self.set_to_none)
            engine.backward(square_loss(step))
            engine.optimizer.step()
            yield f"{self.form} {self.set_to_none}"


def discard_a_backward(engine: Any) -> Iterator[str]:
    for step, (form, set_to_none) in enumerate([("module", True), ("module", False), ("optimizer", True)]):
        engine.zero_grad("optimizer")
        engine.backward(square_loss(50 + step))
        engine.zero_grad(form, set_to_none)
        engine.backward(square_loss(step))
        engine.optimizer.step()
        yield f"discarded by {form}"


def test_gradients_that_are_discarded(world_size: int) -> None:
    run(world_size, mlp, discard_a_backward)


def accumulate_without_no_sync(engine: Any) -> Iterator[str]:
    for step in range(3):
        engine.zero_grad("optimizer")
        for micro in range(3):
            engine.backward(square_loss(3 * step + micro))
        engine.optimizer.step()
        yield "accumulated"


def test_fairscale_accumulation_without_no_sync(world_size: int) -> None:
    run(world_size, mlp, accumulate_without_no_sync)


def accumulate_with_no_sync(engine: Any) -> Iterator[str]:
    for step in range(3):
        engine.zero_grad("module")
        with engine.no_sync():
            engine.backward(square_loss(3 * step))
            engine.backward(square_loss(3 * step + 1))
        engine.backward(square_loss(3 * step + 2))
        engine.optimizer.step()
        yield "no_sync"
        engine.zero_grad("wrapper", set_to_none=False)
        engine.backward(square_loss(90 + step))  # a mean first, then local ones on top
        with engine.no_sync():
            engine.backward(square_loss(70 + step))
        engine.backward(square_loss(80 + step))
        engine.optimizer.step()
        yield "mean, no_sync, sync"


def test_accumulation_with_no_sync(world_size: int) -> None:
    run(world_size, mlp, accumulate_with_no_sync)


def no_sync_then_reduce(engine: Any) -> Iterator[str]:
    for step in range(2):
        engine.zero_grad("module")
        with engine.no_sync():
            engine.backward(square_loss(step))
        if hasattr(engine.model, "reduce"):
            engine.model.reduce()
        engine.optimizer.step()
        yield "reduce()"


def test_reduce_by_hand(world_size: int) -> None:
    run(world_size, mlp, no_sync_then_reduce)


def exception_in_no_sync(engine: Any) -> Iterator[str]:
    for step in range(2):
        engine.zero_grad("optimizer")
        try:
            with engine.no_sync():
                raise KeyError("on purpose")
        except KeyError:
            pass
        engine.backward(square_loss(step))
        engine.optimizer.step()
        yield "after the exception"


def test_fairscale_exception_inside_no_sync(world_size: int) -> None:
    run(world_size, mlp, exception_in_no_sync)


def two_forwards(engine: Any) -> Iterator[str]:
    for step in range(2):
        engine.zero_grad("optimizer")
        engine.backward_of([square_loss(2 * step), square_loss(2 * step + 1)])
        engine.optimizer.step()
        yield "two forwards"


class BackwardTwice:
    """backward(retain_graph=True) and once more."""

    def __call__(self, engine: Any) -> Iterator[str]:
        for step in range(2):
            engine.zero_grad("optimizer")
            ranks = [engine.rank] if hasattr(engine, "rank") else range(engine.world_size)
            for rank in ranks:
                loss = square_loss(step)(engine.model, rank) / (
                    1 if hasattr(engine, "rank") else engine.world_size
                )
                loss.backward(retain_graph=True)
                loss.backward()
            engine.optimizer.step()
            yield "backward twice"


def clipping(engine: Any) -> Iterator[str]:
    norms = []
    for step, norm_type in enumerate([2.0, 1.0, float("inf"), 3.0]):
        engine.zero_grad("optimizer")
        engine.backward(square_loss(step))
        norms.append(engine.clip(0.05, norm_type).item())
        engine.optimizer.step()
        yield f"clip by norm {norm_type}: {norms[-1]:.5f}"


def test_clipping(world_size: int) -> None:
    run(world_size, mlp, clipping, optim=torch.optim.SGD, options={"lr": 1.0})


# ------------------------------------------------------------------ structure that changes
def freeze_and_unfreeze(engine: Any) -> Iterator[str]:
    for step in range(6):
        engine.inner[2].weight.requires_grad_(step % 3 != 1)
        if step % 3 == 1:
            engine.inner[2].weight.grad = None
        engine.zero_grad("optimizer")
        engine.backward(square_loss(step))
        engine.optimizer.step()
        yield f"frozen: {step % 3 == 1}"


class TwoPart(nn.Module):
    """A trunk that is trained from the start and a head that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).tanh())


def trunk_only(model: nn.Module) -> list[dict[str, Any]]:
    for p in model.head.parameters():
        p.requires_grad_(False)
    return [{"params": list(model.trunk.parameters())}]


def add_group(engine: Any) -> Iterator[str]:
    for step in range(4):
        if step == 2:
            for p in engine.inner.head.parameters():
                p.requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(engine.inner.head.parameters()), "lr": 0.05})
        engine.zero_grad("optimizer")
        engine.backward(square_loss(step))
        engine.optimizer.step()
        yield "added" if step >= 2 else "trunk only"


class Branches(nn.Module):
    """Three branches, of which the input chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.never = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return self.branches[which](x)


def rank_dependent_branches(engine: Any) -> Iterator[str]:
    for step in range(4):
        engine.zero_grad("optimizer")
        engine.backward(lambda m, r, s=step: m(batch_for(m, r, s), (r + s) % 3).pow(2).mean())
        engine.optimizer.step()
        yield "branches"


@pytest.mark.parametrize("buffer", [0, 2**23])
def test_fairscale_parameter_used_on_one_rank_only(world_size: int, buffer: int) -> None:
    # weight decay tells an unused parameter (grad None) from one with a zero gradient
    options = {"lr": 0.1, "weight_decay": 0.3}
    run(world_size, Branches, rank_dependent_branches, options=options, ddp={"reduce_buffer_size": buffer})


# ------------------------------------------------------------------ kinds of modules
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed((x[:, 0] * 3).long() % 9)))


def test_fewer_parameters_than_ranks(world_size: int) -> None:
    run(world_size, _one_layer, plain_steps)


def _one_layer() -> nn.Module:
    return nn.Linear(6, 1, bias=False)


@dataclasses.dataclass
class Compiled:
    """Steps of a compiled wrapper."""

    def __call__(self, engine: Any) -> Iterator[str]:
        model = torch.compile(engine.model, backend="aot_eager")
        for step in range(3):
            engine.zero_grad("optimizer")
            engine.backward(lambda _, r, s=step: model(batch(r, s)).pow(2).mean())
            engine.optimizer.step()
            yield "compiled"


def _compiled_mlp() -> nn.Module:
    return torch.compile(mlp(), backend="aot_eager")  # type: ignore[return-value]


def test_torch_compile_outside_and_inside(world_size: int) -> None:
    run(world_size, mlp, Compiled())
    run(world_size, _compiled_mlp, plain_steps)


# ------------------------------------------------------------------ buffers and evaluation
def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _buffers_follow_rank_0(rank: int, world_size: int) -> None:
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS

    torch.manual_seed(rank)
    model = batch_norm_net()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    expected = torch.nn.BatchNorm1d(4)
    gathered: list[Any] = [None] * world_size
    for step in range(3):
        wrapped.train()
        wrapped.zero_grad()
        before = model[0](batch(0, step))  # rank 0's batch through this step's weights
        wrapped(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        expected(before)
        torch.testing.assert_close(model[1].running_mean, expected.running_mean)
        if rank == 0:  # only one rank evaluates, buffers and all: nobody else has to take part
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(0, 99))
    wrapped.eval()
    torch.distributed.all_gather_object(gathered, wrapped(batch(0, 50)).detach())
    for other in gathered:
        torch.testing.assert_close(other, gathered[0])


def test_fairscale_eval_on_rank_0_only_with_buffers(world_size: int) -> None:
    rank_pool(world_size, "gloo").run(_buffers_follow_rank_0, world_size)


def _starts_from_rank_0(rank: int, sync: bool) -> None:
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS

    torch.manual_seed(rank)
    model, reference = mlp(), None
    torch.manual_seed(0)
    reference = mlp()
    wrapped = ShardedDataParallel(model, OSS(model.parameters(), lr=0.1), sync_models_at_startup=sync)
    if sync:
        assert_same(model, reference, f"rank {rank}")
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    assert wrapped.to(torch.device("cpu")) is wrapped
    model.note = "of the module"
    assert wrapped.note == "of the module"


def test_start_values_and_state_dict_prefix(world_size: int) -> None:
    rank_pool(world_size, "gloo").run(_starts_from_rank_0, True)


# ------------------------------------------------------------------ several modules
def _two(rank: int, ranks: int, how: str) -> str:
    """Two modules of equal shapes; ``how``: rank 1 goes back in another order, or sends what is complete earlier."""
    torch.manual_seed(3)
    models = [mlp() for _ in range(2)]
    truths = [copy.deepcopy(m) for m in models]
    wrapped = []
    for m in models:
        oss = shardkit.OSS(m.parameters(), torch.optim.SGD, lr=0.1)
        wrapped.append((shardkit.ShardedDDP(m, oss, reduce=shardkit.ReducePolicy(bucket_numel=16)), oss))
    for step in range(3):
        losses = [m(batch(rank, step)).square().sum() * (k + 1) for k, (m, _) in enumerate(wrapped)]
        differs = step == 2 and rank == 1
        if how == "one backward":
            sum(losses).backward()
        else:
            for loss in losses[:: -1 if differs and how == "order" else 1]:
                loss.backward()
        for k, truth in enumerate(truths):
            truth.zero_grad()
            for r in range(ranks):
                (truth(batch(r, step)).square().sum() * (k + 1) / ranks).backward()
            with torch.no_grad():
                for p in truth.parameters():
                    p.sub_(0.1 * p.grad)
        for m, oss in wrapped:
            oss.step()
            m.zero_grad()
    for model, truth in zip(models, truths, strict=True):
        assert_same(model, truth, f"rank {rank}")
    return ""


def _two_out_of_order(rank: int, ranks: int) -> str:
    try:
        return _two(rank, ranks, "order")
    except OutOfStepError as error:
        return str(error)


def _fails(rank: int) -> str:
    """In the first layer's backward, when rank 0 alone has sent what it waits for."""
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    reduce = shardkit.ReducePolicy(bucket_numel=0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[0](x))
            x.register_hook(lambda _: {}["on purpose"])
            return self.layers[2](self.layers[1](x) if rank == 0 else x)

    net = Net()
    wrapped = shardkit.ShardedDDP(net, shardkit.OSS(net.parameters(), lr=0.1), reduce=reduce)
    try:
        with contextlib.suppress(KeyError):
            wrapped(batch(rank, 0)).sum().backward()
        wrapped.zero_grad()
        wrapped(batch(rank, 1))
    except OutOfStepError as error:
        return str(error)
    return ""


def test_a_backward_fails_while_one_rank_waits_for_gradients(world_size: int) -> None:
    for end in run_once(world_size, "simulated", _fails):
        assert "a backward that raised an error is dropped" in end, end


@pytest.mark.parametrize("backend", ["gloo", "simulated"])
def test_several_modules(world_size: int, backend: str) -> None:
    """Their gradients take the same way, and have equal shapes."""
    for how in ("two backwards", "one backward"):
        rank_pool(world_size, backend).run(_two, world_size, how)
    for end in run_once(world_size, backend, _two_out_of_order, world_size):
        assert re.search(r"the end of backward of Sequential \d", end), end
