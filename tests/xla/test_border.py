"""torch's own idioms on XLA replicas, where execution is lazy and all replicas run one program."""

from __future__ import annotations

import copy
import functools
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import (
    FSDP,
    OSS,
    Change,
    ReshardPolicy,
    SentWeights,
    ShardedDDP,
    fully_shard,
    sharding_of,
    uneven,
)
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, LifecycleError
from tests.beside import assert_same, steps_beside
from tests.border.strategies import batch, heard, make_model, wrapped
from tests.pools import on_ranks

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = ["fsdp", "units", "unflattened", "in_place", "sharded_ddp", "oss"]
CLIP = 0.1


class Run:
    """A wrapped model on its replica, and the same in one process on the CPU."""

    def __init__(
        self, rank: int, world_size: int, strategy: str, make: Any = SGD, frozen: bool = False, **dtype: Any
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.backend = get_backend("xla")
        self.plain = make_model().to(**dtype)
        inner = make_model().to(self.backend.device(), **dtype)
        for model in (self.plain, inner):
            model[0].requires_grad_(not frozen)
        self.plain_optimizer = make(self.plain.parameters())
        if strategy in ("sharded_ddp", "oss"):
            self.optimizer: Any = OSS(inner.parameters(), make)
            self.model: Any = ShardedDDP(inner, self.optimizer) if strategy == "sharded_ddp" else inner
        else:
            self.model = wrapped(strategy, inner)
            self.optimizer = make(self.model.parameters())
        self.inner = inner
        self.averages = strategy == "oss"

    def backward(self, step: int, scale: float = 1.0) -> None:
        x = batch(self.rank, step).to(self.plain[0].weight.dtype)
        x, others = x.to(self.backend.device()), [batch(r, step).to(x) for r in range(self.world_size)]
        ((self.model(x) - 1).square().mean() * 10 * scale).backward()
        if self.averages:
            for p in (p for p in self.model.parameters() if p.grad is not None):
                self.backend.group().all_reduce(p.grad).wait()
                p.grad /= self.world_size
        losses = [(self.plain(other) - 1).square().mean() * 10 for other in others]
        (torch.stack(losses).mean() * scale).backward()

    def step(self, clear: bool = True) -> None:
        for steps in (self.optimizer, self.plain_optimizer):
            steps.step()
        for model in (self.model, self.plain) if clear else ():
            model.zero_grad()
        self.backend.mark_step()

    def assert_equal(self) -> None:
        assert_same(self.model, self.plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks((2, "xla"))
def test_clip_grad_norm_of_torch(rank: int, world_size: int, strategy: str) -> None:
    run = Run(rank, world_size, strategy)
    for step, norm_type in enumerate([2.0, 2.0, 1.0]):
        run.backward(step)
        # torch_xla's; torch's
        clip = nn.utils.clip_grad_norm_ if step else nn.utils.clip_grad.clip_grad_norm_
        norm = clip(run.model.parameters(), CLIP, norm_type)
        truth = nn.utils.clip_grad.clip_grad_norm_(run.plain.parameters(), CLIP, norm_type)
        assert truth > CLIP
        torch.testing.assert_close(norm.cpu(), truth, rtol=1e-4, atol=0)
        run.step(clear=step > 0 or strategy == "oss")  # else the next gradients are added to these
    run.assert_equal()


@on_ranks((1, "xla"), (2, "xla"))
def test_a_tie_outlives_the_move_of_a_unit(rank: int, world_size: int) -> None:
    """A unit that is wrapped on the CPU takes its parameters to the device; modules around it have the CPU's."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[1].weight = plain[0].weight
    inner, device = copy.deepcopy(plain), get_backend("xla").device()
    inner[0] = FSDP(inner[0], device=device)
    model = FSDP(inner, device=device)
    model(torch.full((2, 4), rank + 1.0).to(device)).square().sum().backward()
    losses = [plain(torch.full((2, 4), r + 1.0)).square().sum() for r in range(world_size)]
    torch.stack(losses).mean().backward()
    for each in (model, plain):
        SGD(each.parameters()).step()
    assert_same(model, plain, rtol=1e-4, atol=1e-5)


class LeavesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_left_out: bool) -> torch.Tensor:
        x = self.first(x)
        return x if is_left_out else self.second(x)


@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks((2, "xla"))
def test_zeros_move_what_is_left_out(rank: int, world_size: int, set_to_none: bool) -> None:
    """As in one process: momentum goes on where zero_grad has left zeros, and nothing moves without a gradient."""
    torch.manual_seed(0)
    plain, device = LeavesOut(), get_backend("xla").device()
    inner = copy.deepcopy(plain).to(device)
    optimizer, plain_optimizer = OSS(inner.parameters(), SGD), SGD(plain.parameters())
    model = ShardedDDP(inner, optimizer)
    for is_left_out in (False, True, False):
        model(torch.full((2, 4), rank + 1.0).to(device), is_left_out).sum().backward()
        plain(torch.full((2, 4), (world_size + 1) / 2), is_left_out).sum().backward()
        for steps, cleared in ((optimizer, model), (plain_optimizer, plain)):
            steps.step()
            cleared.zero_grad(set_to_none=set_to_none)
    assert_same(model, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "sharded_ddp"])
@on_ranks((2, "xla"))
def test_torch_xlas_largest_element_is_refused(rank: int, world_size: int, strategy: str) -> None:
    """Its function takes the largest element of each gradient by itself, not a norm."""
    run = Run(rank, world_size, strategy)
    run.backward(0)
    with pytest.raises(ConfigurationError, match="clip_grad_norm"):
        nn.utils.clip_grad_norm_(run.model.parameters(), CLIP, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "oss"])
@on_ranks((2, "xla"))
def test_an_overflow_on_one_replica(rank: int, world_size: int, strategy: str, dtype: torch.dtype) -> None:
    """The second of three steps overflows in one element, which one replica has; torch_xla unscales fp32 alone."""
    run = Run(rank, world_size, strategy, dtype=dtype)
    scaler = torch.amp.GradScaler("xla", init_scale=1024.0, growth_interval=5)
    assert scaler.is_enabled()
    for step in range(3):
        scaler.scale(torch.ones((), device=run.backend.device()))
        run.backward(step, 1.0)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(scaler.get_scale())
        if step == 1:
            bad = torch.tensor([math.inf if rank == 1 else 1.0], device=run.backend.device())
            last = [p for p in run.model.parameters() if p.grad is not None][-1]
            last.grad.mul_(bad)
            run.plain.zero_grad()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        if step != 1:
            run.plain_optimizer.step()
        run.model.zero_grad()
        run.plain.zero_grad()
    run.assert_equal()


@pytest.mark.parametrize("strategy", ["sharded_ddp", "oss"])
@on_ranks((2, "xla"))
def test_built_frozen_and_unfrozen_for_a_backward(rank: int, world_size: int, strategy: str) -> None:
    """The second step updates what was frozen at first, and is again before the step."""
    run = Run(rank, world_size, strategy, frozen=True)
    layers = run.inner[0], run.plain[0]
    for step in range(3):
        for layer in layers:
            layer.requires_grad_(step == 1)
        run.backward(step)
        for layer in layers:
            layer.requires_grad_(False)
        run.step()
        run.assert_equal()


@pytest.mark.parametrize("strategy", ["fsdp", "in_place", "sharded_ddp", "oss"])
@on_ranks((2, "xla"))
def test_steps_that_are_counted_with_others(rank: int, world_size: int, strategy: str) -> None:
    """Right, or warned of where Adam counts the steps of all that lies in one tensor."""
    for make in (SGD, functools.partial(torch.optim.Adam, lr=0.1)):
        run = Run(rank, world_size, strategy, make)
        with heard(logging.WARNING) as lines:
            for step in range(4):
                for model in (run.inner, run.plain):
                    model[2].requires_grad_(step != 1)
                run.backward(step)
                run.step()
        lines = [line for line in lines if line.startswith(f"rank {rank}: ")]  # ranks are threads
        if strategy == "in_place" or make is SGD:
            assert not lines
            run.assert_equal()
        else:
            (line,) = lines
            assert "on this rank in some steps" in line
            assert "Adam counts the steps of the whole flat" in line
            with pytest.raises(AssertionError):  # what it warns of
                run.assert_equal()


@pytest.mark.parametrize("first", range(3))
@on_ranks((2, "xla"))
def test_doors_in_one_program(rank: int, world_size: int, first: int) -> None:
    """One backward goes through FSDP, fully_shard and ShardedDDP, of which each has each place once."""
    backend, plain = get_backend("xla"), make_model()
    model = make_model().to(backend.device())
    optimizers: list[Any] = [torch.optim.SGD(plain.parameters(), lr=0.1)]
    places = (0, 2, 4)
    for place, door in zip(
        places, [("fsdp", "in_place", "sharded_ddp")[(first + k) % 3] for k in range(3)], strict=True
    ):
        layer = model[place]
        if door == "sharded_ddp":
            optimizers.append(OSS(layer.parameters(), torch.optim.SGD, lr=0.1))
            model[place] = ShardedDDP(layer, optimizers[-1])
        else:
            model[place] = FSDP(layer) if door == "fsdp" else fully_shard(layer)
            optimizers.append(torch.optim.SGD(model[place].parameters(), lr=0.1))

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        x = batch(r, step)
        return (m(x if m is plain else x.to(backend.device())) - 1).square().mean()

    for step in range(3):
        steps_beside(rank, world_size, model, plain, loss, optimizers, [step])
        backend.mark_step()
        for place in places:
            assert_same(model[place], plain[place], f"step {step}, layer {place}", rtol=1e-4, atol=1e-5)


@on_ranks((2, "xla"))
def test_where_a_rank_owns_nothing_of_a_group(rank: int, world_size: int) -> None:
    """A state that was loaded is a group's own: two counted their steps in one tensor."""
    plain, inner = make_model(), make_model().to(get_backend("xla").device())
    make = functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3)
    lists = [list(m.parameters()) for m in (inner, plain)]
    mine, truth = ([{"params": params[1:]}, {"params": params[:1]}] for params in lists)
    optimizers: list[Any] = [OSS(mine, make), make(truth)]
    model = ShardedDDP(inner, optimizers[0])

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        return (m(batch(r, step).to(lists[m is plain][0].device)) - 1).square().mean()

    for step in range(4):
        steps_beside(rank, world_size, model, plain, loss, optimizers, [step])
        if step == 1:
            optimizers[0].load_state_dict(optimizers[0].state_dict(all_ranks=True))
    assert_same(inner, plain, rtol=1e-5, atol=1e-6)


@on_ranks((2, "xla"))
def test_gradients_in_segments_are_not_read(rank: int, world_size: int) -> None:
    run = Run(rank, world_size, "sharded_ddp")
    run.backward(0)
    marked = [p.grad for p in run.model.parameters() if p.grad is not None]
    assert marked
    for read in (torch.isnan, torch.Tensor.sum, torch.Tensor.numpy, lambda g: g + 1, torch.clone):
        with pytest.raises(ConfigurationError, match=r"OSS\.clip_grad_norm"):
            read(marked[0])
    copy.deepcopy(run.model.module)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    run.plain.zero_grad()
    run.backward(1)
    run.step()
    run.assert_equal()


@on_ranks((2, "xla"))
def test_released_parameters_are_not_read(rank: int, world_size: int) -> None:
    inner = make_model().to(get_backend("xla").device())
    weight, shape = inner[0].weight, inner[0].weight.shape
    model = FSDP(inner)
    assert weight.shape == shape
    for use in (torch.Tensor.sum, torch.isnan, torch.clone, torch.Tensor.cpu, nn.init.zeros_):
        with pytest.raises(LifecycleError, match=r"0\.weight"):
            use(weight)
    assert "0.weight" in repr(weight)
    model(batch(rank).to(weight.device)).sum().backward()
    with pytest.raises(LifecycleError, match=r"0\.weight"):
        weight.sum()
    for _ in range(2):  # no backward in between
        outputs = model(batch(rank).to(weight.device))
    assert outputs.isfinite().all().item()
    with model.summon_full_params():
        torch.testing.assert_close(weight.detach().cpu(), make_model()[0].weight.detach())


@on_ranks((2, "xla"))
def test_weights_leave_and_what_is_refused(rank: int, world_size: int) -> None:
    run, sent = Run(rank, world_size, "in_place"), SentWeights()
    received = {n: torch.zeros_like(v) for n, v in run.plain.state_dict().items()}
    for step in range(2):
        run.backward(step)
        run.step()
        whole = {n: v.cpu() for n, v in sharding_of(run.model).export(on=0)}
        for name, change in sharding_of(run.model).export(on=0, since=sent):
            assert isinstance(change, Change)
            change.apply(received[name])
        if rank == 0:
            torch.testing.assert_close(whole, dict(run.plain.state_dict()), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(received, whole, rtol=0, atol=0)
    with pytest.raises(ConfigurationError, match="pad those that have fewer"):
        uneven(run.model)
    refused: dict[str, Any] = {"frozen='keep'": {"reshard": ReshardPolicy(frozen="keep")}}
    refused["dtensors=True"] = {"dtensors": True}  # whose state_dict() would be this rank's part
    for word, options in refused.items():
        with pytest.raises(ConfigurationError, match=word):
            fully_shard(nn.Linear(2, 2).to(run.backend.device()), **options)
