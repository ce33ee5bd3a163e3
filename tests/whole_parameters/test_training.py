"""What a training loop does around the step: schedulers, clipping, scaling, accumulation, parameters that sit out."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import (
    FSDP,
    AdaScale,
    OffloadPolicy,
    PrecisionPolicy,
    ShardedGradScaler,
    WholeParameters,
    fully_shard,
    sharding_of,
)  # fmt: skip
from shardkit.errors import ConfigurationError, LifecycleError, OutOfStepError, ShardkitError
from tests.pools import DEVICE, on_ranks, rank_pool
from tests.whole_parameters.nets import batch, difference, net, train, wrap

F64 = torch.float64
RULES = [
    (lambda _, p: p.ndim == 2, torch.optim.Muon, {"lr": 0.05, "weight_decay": 0.1}),
    (("*.bias", "3"), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
]


def losses(model: nn.Module, rank: int, world_size: int, step: int) -> torch.Tensor:
    inputs, targets = batch(step, torch.empty(6, dtype=F64)).chunk(world_size, dim=1)[rank]
    return (model(inputs) - targets).pow(2).mean()


def same_on_ranks(
    program: Callable[..., Any], *args: Any, worlds: tuple[int, ...] = (2, 3), backend: str = "simulated"
) -> None:
    truth = program(0, 1, *args)
    for world_size in worlds:
        found = rank_pool(world_size, backend).run(program, world_size, *args)
        assert difference(found[0], truth) <= 1e-9, world_size


# ------------------------------------------------------------ programs: (rank, world_size, ...) -> state dict
def with_scheduler_and_clip(rank: int, world_size: int, how: str) -> dict[str, Any]:
    model = net() if world_size == 1 else wrap(net(), how)
    optimizer = WholeParameters(model, RULES)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [0.05, 0.01], total_steps=6, cycle_momentum=False
    )
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(5):
        optimizer.zero_grad()
        losses(model, rank, world_size, step).backward()
        if step % 2 and world_size > 1:
            api = model if isinstance(model, FSDP) else sharding_of(model)
            api.clip_grad_norm_(0.3)
        elif step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        else:  # of what the optimizer lists
            params = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(params, 0.2)
        optimizer.step()
        scheduler.step()
    assert seen == ["before", "after"] * 5
    return model.state_dict()


@pytest.mark.parametrize("how", ["fsdp", "fully_shard"])
def test_schedulers_hooks_and_clipping(how: str) -> None:
    same_on_ranks(with_scheduler_and_clip, how, worlds=(2, 3, 4))


def begun_anew(rank: int, world_size: int, how: str, kind: Any) -> dict[str, Any]:
    """State that is cleared; gradients that are looked at before all micro-batches are through."""
    model = net() if world_size == 1 else wrap(net(), how)
    optimizer: Any = kind(model.parameters()) if world_size == 1 else WholeParameters(model, kind)
    for step in range(4):
        sends = world_size == 1 or step % 2
        with contextlib.nullcontext() if sends else sharding_of(model).no_sync():
            losses(model, rank, world_size, step).backward()
        nn.utils.get_total_norm(
            [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        )
        losses(model, rank, world_size, step + 9).backward()
        if how != "fsdp" and step != 1:  # among the model's parameters, of which those entries are none
            next(iter(model.parameters())).grad = None
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.state.clear()
        if step == 2:
            optimizer.state = collections.defaultdict(dict)
    return model.state_dict()


@pytest.mark.parametrize("how", ["fsdp", "fully_shard"])
def test_what_programs_clear_and_look_at(how: str) -> None:
    for kind in (torch.optim.NAdam, torch.optim.Adafactor):
        same_on_ranks(begun_anew, how, kind, worlds=(2, 3))


class Branches(nn.Module):
    """Parameters that are used in some steps alone, a frozen one, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen, self.c = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.a.weight

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.again(torch.tanh(self.a(x)))
        if step % 3 == 1:
            x = self.b(x)
        return self.c(self.frozen(torch.tanh(x)))


def sitting_out(rank: int, world_size: int, how: str, optim: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Branches().to(F64)
    if how != "fsdp" and world_size > 1:
        if how == "fully_shard":
            fully_shard(model.b)
        fully_shard(model)
    elif world_size > 1:
        model = FSDP(model)  # all in two flat parameters
    optimizer = WholeParameters(
        model, optim, lr=0.05, **({"weight_decay": 0.3} if optim is torch.optim.SGD else {})
    )
    assert [n for g in optimizer.param_groups for n in g["param_names"] if "again" in n] == []
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = batch(step, torch.empty(6, dtype=F64)).chunk(world_size, dim=1)[rank]
        (model(inputs, step) - targets).pow(2).mean().backward()
        unused = {
            n
            for g in optimizer.param_groups
            for n, p in zip(g["param_names"], g["params"], strict=True)
            if p.grad is None
        }
        assert unused >= {"frozen.weight", "frozen.bias"}
        there = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        for gradient in there:
            gradient.mul_(0.5 + step)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    numbers = {k: v.get("step", torch.tensor(0.0)).clone() for k, v in state.items()}
    return {**model.state_dict(), **{f"steps of {k}": v for k, v in numbers.items()}}


@pytest.mark.parametrize(
    "optim", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.SGD, torch.optim.Adam]
)
def test_unused_frozen_and_shared_parameters(optim: Any) -> None:
    """Found: changes of gradients that ``param_groups`` list were lost where others of a unit had none."""
    for how in ("fsdp", "fully_shard", "one unit"):
        same_on_ranks(sitting_out, how, optim)


def with_options(rank: int, world_size: int, how: str) -> dict[str, Any]:
    """Offloading changes nothing; bf16 compute changes gradients, and is compared on one sharded rank."""
    options = {
        "offload": {"offload": OffloadPolicy(parameters=True)},
        "bf16": {"precision": PrecisionPolicy(compute=torch.bfloat16)},
    }
    model = wrap(net(torch.float32), "fsdp", **options[how])
    optimizer = WholeParameters(model, torch.optim.Adafactor, lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        inputs = torch.ones(6, 6)
        (model(inputs) - step).float().pow(2).mean().backward()  # the same on all ranks
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("how", ["offload", "bf16"])
def test_offloading_and_mixed_precision(how: str) -> None:
    (truth,) = rank_pool(1, "simulated").run(with_options, 1, how)
    found = rank_pool(4, "simulated").run(with_options, 4, how)
    assert difference(found[0], truth) <= 1e-6


def scaled(rank: int, world_size: int, theirs: bool) -> dict[str, Any]:
    model = net() if world_size == 1 else wrap(net(), "fsdp")
    optimizer = WholeParameters(model, torch.optim.Muon, lr=0.05)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0) if theirs else ShardedGradScaler(init_scale=8.0)
    if world_size == 1:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = losses(model, rank, world_size, step)
        if step == 1 and rank == world_size - 1:
            loss = loss * float("inf")  # on one rank: all skip
        scaler.scale(loss).backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    return model.state_dict()


@pytest.mark.parametrize("theirs", [False, True])
def test_gradient_scaling(theirs: bool) -> None:
    same_on_ranks(scaled, theirs, worlds=(2, 4))


# ------------------------------------------------------------ what is listed
@on_ranks((2, "simulated"))
def test_what_param_groups_list(rank: int, world_size: int) -> None:
    model = wrap(net(), "fsdp")
    optimizer = WholeParameters(model, RULES)
    plain = dict(net().named_parameters())
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["0.weight", "2.weight", "4.weight"], ["0.bias", "3.weight", "3.bias", "4.bias"],
    ]  # fmt: skip
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert (p.shape, p.ndim, p.numel(), p.dtype) == (
                plain[name].shape,
                plain[name].ndim,
                plain[name].numel(),
                F64,
            )
            assert p.requires_grad
            assert p.is_leaf
            assert torch.zeros_like(p).shape == p.shape
            assert name in repr(p)
            with pytest.raises(LifecycleError, match=name):
                p.norm()
            with pytest.raises(LifecycleError, match="register_hook of an entry"):
                p.register_hook(print)
            with pytest.raises(LifecycleError, match="can't be set"):
                p.grad = torch.zeros(p.shape)
    losses(model, rank, world_size, 0).backward()
    for group in optimizer.param_groups:  # a loop that many programs have
        for p in group["params"]:
            p.grad = None
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LifecycleError, match="from the beginning"):
        optimizer.add_param_group({"params": list(model.parameters())})


def refused(rank: int) -> list[str]:
    said = []

    def refusal(*args: Any, **options: Any) -> None:
        with pytest.raises(Exception) as caught:
            WholeParameters(*args, **options)
        assert isinstance(caught.value, ShardkitError), caught.value
        said.append(str(caught.value))

    model = wrap(net(), "fsdp")
    refusal(model, [("nowhere", torch.optim.SGD, {})])
    refusal(model, [("0", torch.optim.SGD)])
    refusal(model, torch.optim.SGD(net().parameters(), lr=0.1))
    refusal(model, nn.Linear)
    refusal(model, [("0", torch.optim.LBFGS, {})])
    refusal(model, [(lambda n, _: n == f"{2 * rank}.weight", torch.optim.SGD, {})])
    refusal(model, _Picky, lr=0.1)
    refusal(nn.Tanh(), torch.optim.SGD)
    return said


class _Picky(torch.optim.SGD):
    """Refuses a shape that one rank alone will see."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(p.shape == (6,) and p.abs().sum() == 6 for g in self.param_groups for p in g["params"]):
            raise ValueError("no ones here")

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * p.norm())


def test_refusals_are_on_all_ranks() -> None:
    first, second = rank_pool(2, "simulated").run(refused)
    for a, b in zip(first, second, strict=True):
        assert a.partition("this rank is")[0] == b.partition("this rank is")[0]


@on_ranks((2, "simulated"))
def test_gradients_that_were_not_reduced_are_refused(rank: int) -> None:
    for how in ("fsdp", "fully_shard"):
        model = wrap(net(), how)
        optimizer = WholeParameters(model, torch.optim.Muon, lr=0.1)
        with sharding_of(model).no_sync():
            losses(model, rank, 2, 0).backward()
        with pytest.raises(LifecycleError, match="no_sync"):
            optimizer.step()
        losses(model, rank, 2, 1).backward()
        optimizer.step()


def changed_on_one(rank: int, world_size: int, optim: Any, how: str, wrapper: str) -> str:
    """How a training ends of which the last rank changes something before its third step."""
    model = wrap(net(), wrapper)
    optimizer = WholeParameters(model, optim, lr=0.05)
    try:
        for step in range(4):
            losses(model, rank, world_size, step).backward()
            entries, is_odd = optimizer.param_groups[0]["params"], step == 2 and rank == world_size - 1
            if is_odd and how == "option":
                optimizer.param_groups[0]["lr"] = 0.7
            elif is_odd and how == "shard":
                next(iter(model.parameters())).grad = None
            elif how == "entry" and (is_odd or step < 2):  # before that on all ranks
                entries[0].grad = None
            optimizer.step()
            optimizer.zero_grad()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("optim", [torch.optim.Muon, torch.optim.AdamW])  # at owners, and in place
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("option", "a step with other options than before: lr of group 0 0.7"),
        ("shard", r"a step of WholeParameters \d+ without the gradients of parameter"),
        ("entry", r"a step of WholeParameters \d+ without the gradients of parameter '0\.weight'"),
    ],
)
def test_what_one_rank_alone_changes(optim: Any, how: str, words: str) -> None:
    for wrapper in ("fsdp", "fully_shard"):
        for end in rank_pool(3, "simulated").run(changed_on_one, 3, optim, how, wrapper):
            assert re.search(words, end), (wrapper, end)


def with_slopes(rank: int, world_size: int, how: str, optim: Any) -> dict[str, Any]:
    """A penalty on gradients, for which values stay gathered from one forward to the next."""
    model = net() if world_size == 1 else wrap(net(), how)
    optimizer = WholeParameters(model, optim, lr=0.05)
    for step in range(3):
        inputs = batch(step, torch.empty(6, dtype=F64)).chunk(world_size, dim=1)[rank][0].requires_grad_()

        def evaluated(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            loss = slope.square().mean()
            loss.backward()
            return loss

        if optim is torch.optim.LBFGS:
            optimizer.step(evaluated)
        else:
            evaluated()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("optim", [torch.optim.Muon, torch.optim.AdamW, torch.optim.LBFGS])
def test_gradient_penalties(optim: Any) -> None:
    """What was gathered before a step is old after it."""
    if DEVICE["name"] == "streams":
        pytest.skip(
            "while a mode watches, a norm's second backward is refused the parameter that it has saved"
        )
    for how in ("fsdp", "fully_shard"):
        same_on_ranks(with_slopes, how, optim, worlds=(2,))


@on_ranks((2, "simulated"))
def test_adascale_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="stands for"):
        AdaScale(WholeParameters(wrap(net(), "fsdp"), torch.optim.Muon, lr=0.1))
    AdaScale(WholeParameters(net(), torch.optim.SGD, lr=0.1))  # whole on every rank


@on_ranks((2, "simulated"))
def test_a_model_that_is_wrapped_later_is_refused(rank: int) -> None:
    model = net()
    optimizer = WholeParameters(model, torch.optim.SGD, lr=0.1)
    model = wrap(model, "fsdp")
    losses(model, rank, 2, 0).backward()
    with pytest.raises(LifecycleError, match="after wrapping"):
        optimizer.step()


@on_ranks((2, "simulated"))
def test_a_plain_loop_is_what_the_readme_says(rank: int) -> None:
    model = wrap(net(), "fully_shard")
    before = difference(net().state_dict(), model.state_dict())
    train(model, WholeParameters(model, torch.optim.Muon, lr=0.05), rank, 2)
    assert before == 0.0
    assert difference(net().state_dict(), model.state_dict()) > 0.0
