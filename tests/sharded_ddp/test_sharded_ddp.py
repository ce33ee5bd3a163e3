"""ShardedDataParallel beside what programs tell: reductions by hand, compilers, several modules, failures.

``tests/differential/test_sharded_ddp_truth.py`` has the programs.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.errors import ConfigurationError, LifecycleError, OutOfStepError, ShardkitError
from shardkit.nn.data_parallel import ShardedDataParallel
from tests.beside import SGD, assert_same, batch, mean_square, steps_beside
from tests.fsdp_models import build
from tests.pools import on_ranks, rank_pool, run_once

sizes = pytest.mark.parametrize("world_size", [2, 3])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 3)
    )


@on_ranks(2, 3)
def test_reduce_by_hand(rank: int, world_size: int) -> None:
    plain, inner = build(mlp), build(mlp)
    oss, optimizer = shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())
    model = ShardedDataParallel(inner, oss)
    for step in range(2):
        oss.zero_grad()
        optimizer.zero_grad()
        with model.no_sync():
            mean_square(model, rank, step).backward()
        model.reduce()
        torch.stack([mean_square(plain, r, step) for r in range(world_size)]).mean().backward()
        oss.step()
        optimizer.step()
        assert_same(model, plain, f"rank {rank}, step {step}")


@pytest.mark.parametrize("options", [{}, {"partition": "balanced"}, {"sends_changes": True}], ids=str)
@pytest.mark.parametrize(
    "when", ["before the step", "between micro-batches", "while gradients are old", "but in backward"]
)
@on_ranks(1, 2, 3, (2, "simulated"))
def test_frozen_with_a_gradient(rank: int, world_size: int, when: str, options: dict[str, Any]) -> None:
    """Its gradient still moves a parameter, on all ranks, as in one process."""
    plain, inner = build(mlp), build(mlp)

    def freeze(is_frozen: bool) -> None:
        for module in (inner, plain):
            module[0].requires_grad_(not is_frozen)  # type: ignore[index]

    freeze(when == "but in backward")
    oss = shardkit.OSS(inner.parameters(), torch.optim.AdamW, lr=0.1, **options)
    freeze(False)
    model, optimizer = ShardedDataParallel(inner, oss), torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        freeze(step > 1 and when == "while gradients are old")
        for k in range(2 + step % 2):
            freeze(k == 1) if when == "between micro-batches" else None
            mean_square(model, rank, 3 * step + k).backward()
            torch.stack([mean_square(plain, r, 3 * step + k) for r in range(world_size)]).mean().backward()
        if when in ("before the step", "but in backward"):
            freeze(when == "but in backward" or step % 2 == 1)
        if when == "but in backward" and step == 0:  # nothing moves it
            for module in (inner, plain):
                module[0].zero_grad()  # type: ignore[index]
        oss.step()
        optimizer.step()
        assert_same(inner, plain, f"rank {rank}, step {step}")
        if when != "while gradients are old":
            freeze(False)
            oss.zero_grad()
            optimizer.zero_grad()


@on_ranks(1, 2)
def test_frozen_between_micro_batches_of_a_fixed_order(rank: int, world_size: int) -> None:
    plain, inner = build(mlp), build(mlp)
    oss = shardkit.OSS(inner.parameters(), torch.optim.AdamW, lr=0.1)
    reduce = shardkit.ReducePolicy(order="fixed", microbatches=2 * world_size)
    model, optimizer = (
        shardkit.ShardedDDP(inner, oss, reduce=reduce),
        torch.optim.AdamW(plain.parameters(), lr=0.1),
    )
    for step in range(3):
        for k in range(2):
            for module in (inner, plain):
                module[0].requires_grad_(k == 0 or step == 2)  # type: ignore[index]
            mean_square(model, rank, 2 * step + k).backward()
            losses = [mean_square(plain, r, 2 * step + k) for r in range(world_size)]
            (torch.stack(losses).mean() / 2).backward()
        oss.step()
        optimizer.step()
        assert_same(inner, plain, f"rank {rank}, step {step}")
        oss.zero_grad()
        optimizer.zero_grad()


@on_ranks(2, 3)
def test_frozen_between_gradients_that_nobody_has_reduced(rank: int) -> None:
    """Refused on all ranks, those that have no gradient of it too, until they are cleared."""
    inner = build(mlp)
    model = ShardedDataParallel(inner, shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1))
    with model.no_sync():
        mean_square(model, rank, 0).backward()
        inner[0].requires_grad_(False)  # type: ignore[index]
        inner[0].zero_grad() if rank else None  # type: ignore[index]
        with pytest.raises(LifecycleError, match=r"frozen between backwards inside of no_sync\(\)"):
            mean_square(model, rank, 1)
        model.zero_grad()
        mean_square(model, rank, 1).backward()


@on_ranks(2, 3)
def test_other_ranks_than_those_of_the_optimizer(rank: int, world_size: int) -> None:
    """Refused: owners would be others than those who get the gradients."""
    groups = [torch.distributed.new_group([r]) for r in range(world_size)]
    inner = build(mlp)
    alone = shardkit.OSS(inner.parameters(), torch.optim.SGD, group=groups[rank], lr=0.1)
    with pytest.raises(ConfigurationError, match=rf"over ranks \[0, 1.*owners among \[{rank}\]"):
        ShardedDataParallel(inner, alone)
    plain = build(mlp)
    model = ShardedDataParallel(
        inner, alone, process_group=groups[rank]
    )  # each rank trains a model of its own
    optimizers = [alone, SGD(plain.parameters())]
    steps_beside(0, 1, model, plain, mean_square, optimizers)
    assert_same(inner, plain)
    with pytest.raises(ConfigurationError, match="takes the model itself, and got a generator"):
        shardkit.WholeParameters(inner.parameters(), torch.optim.SGD)


@on_ranks(1, 2, 3)
def test_a_step_of_what_nobody_has_reduced(rank: int, world_size: int) -> None:
    """Refused on all ranks, in a clip too; nothing of it is left. Alone it is right."""
    plain, inner = build(mlp), build(mlp)
    optimizers = [shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())]
    model = ShardedDataParallel(inner, optimizers[0])
    for to_none in (True, False):
        with model.no_sync():
            mean_square(model, rank, 0).backward()
        if world_size > 1:
            for call in (optimizers[0].step, lambda: optimizers[0].clip_grad_norm(0.1)):  # type: ignore[attr-defined]
                with pytest.raises(LifecycleError, match=rf"rank {rank}: .* inside of no_sync\(\)"):
                    call()
        model.zero_grad(to_none)
        if not to_none:
            optimizers[0].step()  # of zeros
        steps_beside(rank, world_size, model, plain, mean_square, optimizers)
        assert_same(model, plain)
    if world_size == 1:
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            with model.no_sync():
                mean_square(m, rank, 0).backward()
            optimizer.step()
        assert_same(model, plain)


@pytest.mark.parametrize("by", ["the closure", "the program"])
@on_ranks(2, 3)
def test_gradients_of_no_sync_that_are_reduced_otherwise(rank: int, world_size: int, by: str) -> None:
    """In the closure of the step itself (Lightning's accumulation), or by a program that averages them."""
    plain, inner = build(mlp), build(mlp)
    optimizers = [shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())]
    model = ShardedDataParallel(inner, optimizers[0])
    for step in range(0, 6, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()

        def last(step: int = step) -> torch.Tensor:
            loss = mean_square(model, rank, step + 1)
            loss.backward()
            return loss

        with model.no_sync():
            mean_square(model, rank, step).backward()
            if by == "the program":
                last()
                for param in inner.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= world_size
        optimizers[0].step(*[last] * (by == "the closure"))
        for k in range(2):
            for r in range(world_size):
                (mean_square(plain, r, step + k) / world_size).backward()
        optimizers[1].step()
        assert_same(model, plain)


class Calls(nn.Module):
    """Computes a loss of what it holds."""

    def __init__(self, inner: nn.Module, loss: Any) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.inner, rank, step)
        return loss


@on_ranks(2, 3)
def test_what_no_rank_uses_stays_as_it_is_for_an_optimizer_beside_oss(rank: int, world_size: int) -> None:
    """A gradient of zeros would have decay and momentum move it; some ranks' uses are all ranks' gradient."""

    def loss(model: nn.ModuleList, rank: int, step: int) -> torch.Tensor:
        x = model[1](torch.tanh(model[0](batch(rank, step))))
        if step != 1:
            x = model[2](x)
        return (model[3](x) if rank == 0 else x).square().mean() if step else x.square().mean()

    def beside(layers: nn.ModuleList) -> torch.optim.Optimizer:
        return torch.optim.SGD(layers[2:].parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)

    plain, inner = (build(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(4))) for _ in range(2))
    oss = shardkit.OSS(inner[:2].parameters(), torch.optim.SGD, lr=0.1)
    optimizers = [oss, beside(inner), SGD(plain[:2].parameters()), beside(plain)]
    models = [shardkit.ShardedDDP(Calls(inner, loss), oss), Calls(plain, loss)]
    for step in range(4):
        steps_beside(rank, world_size, *models, lambda m, r, step: m(r, step), optimizers, [step])
        assert_same(inner, plain, f"step {step}")
        for mine, expected in zip(inner[2:].parameters(), plain[2:].parameters(), strict=True):
            assert (mine.grad is None) == (expected.grad is None)


@pytest.mark.parametrize("outside", [True, False])
@on_ranks(2, 3)
def test_torch_compile(rank: int, world_size: int, outside: bool) -> None:
    plain, inner = build(mlp), build(mlp)
    optimizers = [shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())]
    made: Any = inner if outside else torch.compile(inner, backend="aot_eager")
    model: Any = ShardedDataParallel(made, optimizers[0])
    model = torch.compile(model, backend="aot_eager") if outside else model
    steps_beside(rank, world_size, model, plain, mean_square, optimizers)
    assert_same(inner, plain)


@on_ranks(2)
def test_the_wrapper_is_the_module_under_a_prefix(rank: int) -> None:
    model = mlp()
    wrapped = ShardedDataParallel(model, shardkit.OSS(model.parameters(), torch.optim.SGD, lr=0.1))
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    assert wrapped.to(torch.device("cpu")) is wrapped
    model.note = "of the module"
    assert wrapped.note == "of the module"


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


@sizes
def test_a_backward_fails_while_one_rank_waits_for_gradients(world_size: int) -> None:
    for end in run_once(world_size, "simulated", _fails):
        assert "a backward that raised an error is dropped" in end, end


@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "simulated"), (3, "simulated")])
def test_several_modules(world_size: int, backend: str) -> None:
    """Their gradients take the same way, and have equal shapes."""
    for how in ("two backwards", "one backward"):
        rank_pool(world_size, backend).run(_two, world_size, how)
    for end in run_once(world_size, backend, _two_out_of_order, world_size):
        assert re.search(r"the end of backward of Sequential \d", end), end


# ------------------------------------------------------------------ values and parameters from elsewhere
def _loaded(model: nn.Module, how: str, state: dict[str, Any]) -> None:
    if how == "a part":
        model.module[2].load_state_dict({"weight": state["2.weight"]})  # type: ignore[index]
    elif how == "the wrapper":
        model.load_state_dict({f"module.{k}": v for k, v in state.items()})
    else:
        model.module.load_state_dict(state, assign=how == "assigned")


LOADS = ["the wrapper", "the module", "a part", "assigned"]


def _loads_alone(rank: int, who: int | None, how: str, when: str) -> str:
    """Where nobody does, all load, each another state."""
    inner = build(mlp)
    oss = shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1)
    model = shardkit.ShardedDDP(inner, oss)
    state = {k: v + (rank + 1) for k, v in inner.state_dict().items()}
    try:
        for step in range(3):
            for at in ("before a forward", "before a step"):
                _loaded(model, how, state) if (at, step) == (when, 1) and who in (rank, None) else None
                mean_square(model, rank, step).backward() if at == "before a forward" else oss.step()
    except ShardkitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("who", [0, 1, None])
@pytest.mark.parametrize("when", ["before a forward", "before a step"])
@pytest.mark.parametrize("how", LOADS)
def test_what_one_rank_loads_alone(how: str, when: str, who: int | None) -> None:
    if who is None and how == "assigned":
        return  # rank 0's are taken up
    for end in run_once(2, "simulated" if who else "gloo", _loads_alone, who, how, when):
        assert re.search("state_dict|replaced or added", end), end


@pytest.mark.parametrize("how", LOADS[:3])
@pytest.mark.parametrize("sync", [True, False])
@on_ranks(1, 2, 3, (2, "simulated"))
def test_what_all_ranks_load_or_one_puts_back(rank: int, world_size: int, how: str, sync: bool) -> None:
    """Before and after wrapping, and while rank 0 evaluates alone."""
    plain, inner = build(mlp), build(mlp)
    other = {k: v + 1 for k, v in plain.state_dict().items()}
    inner.load_state_dict(other) if rank and sync else None  # rank 0's replace it
    oss, optimizer = shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())
    model = shardkit.ShardedDDP(inner, oss, sync_module_states=sync)
    for step in range(4):
        own = {k: v.clone() for k, v in inner.state_dict().items()}
        if step == 1:
            for m in (model, nn.ModuleDict({"module": plain})):
                _loaded(m, how, other)
        elif rank == 0 or step == 3:
            for state in (other, own):
                _loaded(model, how, state)
        steps_beside(rank, world_size, model, plain, mean_square, [oss, optimizer], [step])
        assert_same(inner, plain, f"rank {rank}, step {step}")


class _Scaled(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.by = nn.Parameter(torch.rand(7) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def _halved(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss with parameters that are there for a call."""
    halves = {k: 0.5 * p for k, p in model.named_parameters()}
    return torch.func.functional_call(model, halves, (batch(rank, step),)).square().mean()


@pytest.mark.parametrize("how", ["a module", "a parameter", "assigned"])
@pytest.mark.parametrize("owned", [True, False])
@on_ranks(1, 2, 3, (2, "simulated"))
def test_parameters_registered_later(rank: int, world_size: int, how: str, owned: bool) -> None:
    """Reduced, from rank 0's values on, whether the OSS updates them or another optimizer."""
    plain, inner = build(mlp), build(mlp)
    oss, optimizer = shardkit.OSS(inner.parameters(), torch.optim.SGD, lr=0.1), SGD(plain.parameters())
    model = shardkit.ShardedDDP(inner, oss)
    optimizers: list[Any] = [oss, optimizer]
    for step in range(4):
        if step == 1:
            for module, seed in ((inner, rank), (plain, 0)):
                new, first = _Scaled(seed), module[0]  # type: ignore[index]
                if how == "a module":
                    module[0] = nn.Sequential(first, new)  # type: ignore[index]
                elif how == "a parameter":
                    first.bias = new.by
                else:
                    first.load_state_dict({"weight": first.weight + seed, "bias": new.by}, assign=True)
                added = list((new if how == "a module" else first).parameters())[-1:]
                if owned and module is inner:
                    oss.add_param_group({"params": added})
                else:
                    optimizers.append(SGD(added))
        steps_beside(
            rank, world_size, model, plain, _halved if step == 2 else mean_square, optimizers, [step]
        )
        assert_same(inner, plain, f"rank {rank}, step {step}")
