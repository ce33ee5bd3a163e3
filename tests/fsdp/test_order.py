"""FSDP's units are gathered in one order on all ranks, and anew in each forward."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardkit import (
    FSDP,
    OSS,
    ReducePolicy,
    ReshardPolicy,
    ShardedDDP,
    WholeParameters,
    fully_shard,
    sharding_of,
)
from shardkit.errors import LifecycleError, OutOfStepError
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP
from tests.beside import assert_same
from tests.doors import DOORS, through
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import DEVICE, on_ranks, rank_pool, run_once


class Cut(nn.Module):
    """Where told, backward ends behind the first two parts, each of which is gathered by itself: they are large."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(WIDTH, 1500), nn.Linear(1500, WIDTH)) for _ in range(3)]
        self.first, self.second, self.last = parts
        self.cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.last(x.detach() if self.cut else x)


class Spared(nn.Module):
    """A unit, and a layer of the root's own that one rank does not use, or behind which its backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        x = self.unit(x if how == "spared" else self.spare(x))
        return x.detach() + self.spare(x.detach()) if how == "cut" else torch.tanh(x)


Doors = Sequence[Callable[..., nn.Module] | None]  # of each root; None: ShardedDDP


# rank 1's forwards: of the discriminator, of the generator inside, of the discriminator again
NESTED = ("", "spared", "")


def _roots_of_one_backward(
    rank: int, world_size: int, doors: Doors, how: str, around: tuple[str, str, str] = NESTED
) -> None:
    plain = nn.ModuleList([build(Spared) for _ in doors])
    roots = copy.deepcopy(plain)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(plain.parameters(), lr=0.1)]
    for k, (root, door) in enumerate(zip(roots, doors, strict=True)):
        if door is None:
            optimizers.append(OSS(root.parameters(), torch.optim.SGD, lr=0.1))
            reduce = ReducePolicy(bucket_numel=0)  # each gradient for itself
            roots[k] = ShardedDDP(root, optimizers[-1], reduce=reduce)  # type: ignore[arg-type]
        else:
            root.unit = door(root.unit)
            roots[k] = door(root)
            optimizers.append(torch.optim.SGD(roots[k].parameters(), lr=0.1))
    for step in range(3):
        xs = batch(step, world_size)
        for r, models in [*((r, plain) for r in range(world_size)), (rank, roots)]:
            if how == "around":  # as a discriminator's forwards are around its generator's
                first, inside, again = around if r else ("", "", "")
                outs = [models[0](xs[r], first), models[0](models[1](xs[r], inside) + 1, again)]
                outs += [m(xs[r], "") for m in models[2:]]
            else:
                outs = [m(xs[r], how if k != 1 and r == k // 2 else "") for k, m in enumerate(models)]
            loss: torch.Tensor = sum(out.square().mean() * (k + 1) for k, out in enumerate(outs))  # type: ignore[assignment]
            (loss / world_size if models is plain else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, truth in zip(roots, plain, strict=True):
        assert_same(mine, truth)


MIXED: list[Doors] = [(FSDP, None, fully_shard), (None, FSDP, None)]


def test_roots_of_which_one_rank_lacks_gradients() -> None:
    """What is left of a root's order comes before the next root's, or ranks would send in other orders."""
    for doors in ((FSDP,) * 3, (fully_shard,) * 3, (None,) * 3, *MIXED):
        for how in ("spared", "cut"):
            for world_size in (2, 3):
                rank_pool(world_size, "simulated").run(_roots_of_one_backward, world_size, doors, how)


def test_a_discriminator_around_its_generator() -> None:
    for doors in ((FSDP, FSDP, None), *MIXED):
        rank_pool(2, "simulated").run(_roots_of_one_backward, 2, doors, "around")


def _or_out_of_step(rank: int, world_size: int, doors: Doors, around: tuple[str, str, str]) -> bool:
    try:
        _roots_of_one_backward(rank, world_size, doors, "around", around)
    except OutOfStepError:
        return False
    return True


def test_forwards_that_do_not_nest_and_a_rank_without_all_gradients() -> None:
    """Right, or refused on all ranks: a rank that also ends its backward early may send in another order."""
    for doors in ((FSDP, FSDP), (FSDP, None), (None, FSDP)):
        for around, is_right in ((("cut", "cut", ""), True), (("", "cut", "cut"), False)):
            ranks = run_once(2, "simulated", _or_out_of_step, 2, doors, around)
            assert ranks == [is_right, is_right], (doors, around)


class Halves(nn.Module):
    """Two layers whose gradients, reduced to owners or to shards, make messages of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * 2 + self.second(x)


def _without_one(rank: int, doors: Doors, missed: int) -> str:
    """On rank 1 a backward does not come to one of the roots at all."""
    roots: list[nn.Module] = []
    for door in doors:
        root = build(Halves)
        oss = OSS(root.parameters(), torch.optim.SGD, lr=0.1) if door is None else None
        roots.append(door(root) if oss is None else ShardedDDP(root, oss))  # type: ignore[misc]
    for step in range(2):
        outs = [m(torch.ones(1, WIDTH)).sum() for m in roots]
        try:
            sum(out for k, out in enumerate(outs) if not (step and rank and k == missed)).backward()
        except OutOfStepError as error:
            return str(error)
    return ""


def test_a_module_that_one_rank_goes_past() -> None:
    """The next one's gradients would meet its own."""
    for doors in MIXED:
        for missed in (1, 2):
            for end in run_once(2, "simulated", _without_one, doors, missed):
                assert re.search(r"backward through|end of backward", end), (doors, missed, end)


@on_ranks(2)
def test_a_forward_without_backward_leaves_nothing_old(rank: int, world_size: int) -> None:
    plain, model = build(Cut), through("FSDP", build(Cut), "first", "second", "last")
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(3):
        xs = batch(step, world_size)
        first.zero_grad()
        second.zero_grad()
        model(xs[rank]).pow(2).mean().backward()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        model(xs[rank])  # its graph is dropped: the unit called last is still gathered at the step
        first.step()
        second.step()
        for p in model.parameters():
            p.data.mul_(0.5)
        for p in plain.parameters():
            p.data.mul_(0.5)
        torch.testing.assert_close(model(xs[rank]), plain(xs[rank]))


class Switched(nn.Module):
    """Two layers, of which one is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.both = self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.both:
            return self.always(x)
        y = self.sometimes(x)
        return self.always(x) + (y if self.uses else y.detach())


@pytest.mark.parametrize("door", [None, *DOORS])
@on_ranks(2)
def test_a_layer_that_a_whole_step_of_several_batches_leaves_out(
    rank: int, world_size: int, door: str | None
) -> None:
    """While gradients wait under no_sync, zeros stand in their place, which are no gradient of that layer.

    Where that layer is a unit, the last batch leaves it out, and some ranks had no gradient of it before.
    """
    plain, model = build(Switched), build(Switched)
    inner: Any = model
    model = FSDP(model) if door is None else through(door, model, "sometimes")
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    first, second = (torch.optim.SGD(m.parameters(), **options) for m in (plain, model))
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        for micro in range(2):
            xs = batch(2 * step + micro, world_size)
            plain.both = inner.both = step != 1 if door is None else micro == 0
            with sharding_of(model).no_sync() if micro == 0 else contextlib.nullcontext():
                inner.uses = door is None or rank == step
                model(xs[rank]).pow(2).mean().backward()
            for k, x in enumerate(xs):
                plain.uses = door is None or k == step
                (plain(x).pow(2).mean() / world_size).backward()
        first.step()
        second.step()
        assert_same(model, plain)


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).pow(2).mean().backward()


@on_ranks(2)
def test_a_step_that_leaves_out_what_no_sync_keeps_is_refused(rank: int, world_size: int) -> None:
    """fairscale steps with nothing, silently: weight decay and counts of steps go on."""
    for shard in (FSDP, fully_shard):
        plain, model = build(Switched), build(Switched)
        model = shard(model)
        sharded = model if shard is FSDP else sharding_of(model)
        first, second = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model))
        xs = batch(0, world_size)
        with sharded.no_sync():
            model(xs[rank]).pow(2).mean().backward()
        for _ in range(2):
            with pytest.raises(LifecycleError, match="inside of no_sync"):
                second.step()
        model(xs[rank]).pow(2).mean().backward()  # adds to what was kept, and reduces both
        for _ in range(2):
            torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        first.step()
        second.step()
        assert_same(model, plain)
        second.zero_grad()
        with sharded.no_sync():
            model(xs[rank]).pow(2).mean().backward()
        second.zero_grad()
        second.step()  # nothing to step with, and nothing left out
        assert_same(model, plain)
        first.zero_grad()
        with sharded.no_sync():
            model(xs[rank]).pow(2).mean().backward()
        for _ in range(2):
            torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        first.step()
        second.step(partial(_backward, model, xs[rank]))  # reduces what waited
        assert_same(model, plain)


# ------------------------------------------------------------------ ranks that call in different orders
def _alike(door: str, count: int = 2) -> list[nn.Module]:
    """Roots that differ in nothing but their values."""
    torch.manual_seed(5)
    return [DOORS[door](nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def _evaluates(door: str, swapped: bool) -> None:
    with torch.no_grad():
        for model in _alike(door)[:: -1 if swapped else 1]:
            model(torch.ones(1, WIDTH))


def _evaluates_units(door: str, swapped: bool) -> None:
    """Units of one root, called directly."""
    root = DOORS[door](nn.Sequential(*_alike(door)))
    inner = list((root.module if isinstance(root, FSDP | TorchFSDP) else root).children())
    with torch.no_grad():
        for model in inner[:: -1 if swapped else 1]:
            model(torch.ones(1, WIDTH))


def _goes_back(door: str, swapped: bool) -> None:
    """Roots are still gathered: nothing but gradients travels."""
    losses = [model(torch.ones(1, WIDTH)).sum() for model in _alike(door)]
    for loss in losses[:: -1 if swapped else 1]:
        loss.backward()


def _saves(door: str, swapped: bool) -> None:
    for model in _alike(door)[:: -1 if swapped else 1]:
        model.state_dict()


def _calls_copies(door: str, swapped: bool) -> None:
    (model,) = _alike(door, 1)
    copies = [copy.deepcopy(model) for _ in range(2)]
    with torch.no_grad():
        for each in copies[:: -1 if swapped else 1]:
            each(torch.ones(1, WIDTH))


def _in_other_orders(rank: int, program: Callable[[str, bool], None], doors: list[str]) -> list[str]:
    """What it came to at each door, if one rank alone calls in the opposite order."""
    ends = []
    for door in doors:
        program(door, False)
        try:
            program(door, rank == 1)
            ends.append("")
        except OutOfStepError as error:
            ends.append(str(error))
    return ends


@pytest.mark.parametrize("backend", ["simulated", "streams"])
@pytest.mark.parametrize(
    "program", [_evaluates, _evaluates_units, _goes_back, _saves, _calls_copies], ids=lambda p: p.__name__[1:]
)
def test_roots_of_equal_shapes_in_another_order(program: Callable[..., None], backend: str) -> None:
    """They would get each other's weights or gradients."""
    doors = [door for door in DOORS if door != "dtensors"]  # which need torch's ranks
    for ends in rank_pool(2, backend).run(_in_other_orders, program, doors):
        for door, end in zip(doors, ends, strict=True):
            assert len(set(re.findall(r"unit [\w.-]+", end))) == 2, (door, end)


def test_roots_in_another_order_on_processes() -> None:
    for program, words in (
        (_goes_back, "backward through parameters 0 of the root, unit ."),
        (_evaluates, r"all_gather_into of \d+ elements \(parameters 0 of the root, unit ."),
    ):
        for ends in run_once(2, "gloo", _in_other_orders, program, ["dtensors"]):
            assert {found[-1] for found in re.findall(words, ends[0])} == {"3", "4"}, ends


class Chosen(nn.Module):
    """Units of equal shapes, of which those that are named are called in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor, *calls: int) -> torch.Tensor:
        return sum(self.parts[k](x) for k in calls)  # type: ignore[no-any-return]


def _goes_its_way(rank: int, door: str, ways: Sequence[Sequence[int]], waits: bool) -> str:
    """All has been gathered, in one message, before ranks part: gradients alone travel, if they do not wait."""
    strategy = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    keeps = strategy if door.startswith("torch") else {"reshard": ReshardPolicy(after_forward=False)}
    model = through(door, build(Chosen), *(f"parts.{k}" for k in range(3)), **keeps)
    try:
        for step in range(4):
            with sharding_of(model).no_sync() if waits and step == 1 else contextlib.nullcontext():
                model(torch.ones(1, WIDTH), *ways[rank] if step == 1 else range(3)).sum().backward()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("door", "ways", "waits"),
    [
        ("FSDP", ((0, 1, 2), (0, 2)), False),  # its process was aborted: gloo got a message of another size
        ("dtensors", ((0, 1), (0, 2)), False),  # the rest got each other's gradients,
        ("torch_fsdp_orig", ((0, 1, 2), (0, 2, 1)), False),
        ("fully_shard", ((0, 1, 2), (0, 2, 1)), True),  # and weights
    ],
)
def test_small_units_that_one_rank_calls_otherwise(door: str, ways: Any, waits: bool) -> None:
    """Layers that ranks drop by random numbers of their own."""
    words = r"parameters 0 of [\w.]+, unit ([\d, ]+)" if waits else r"backward through [^)]*"
    for end in run_once(2, "gloo", _goes_its_way, door, ways, waits):
        assert len(set(re.findall(words, end))) > 1, end


def _updates(rank: int, optimizer: str, saves: bool) -> str:
    """Two optimizers over equal shapes, which one rank alone steps, or saves, in the opposite order."""
    torch.manual_seed(5)
    models, optimizers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)], []
    for k, model in enumerate(models):
        if optimizer == "OSS":
            optimizers.append(oss := OSS(model.parameters(), torch.optim.Adam, lr=0.1))
            models[k] = ShardedDDP(model, oss)  # type: ignore[assignment, arg-type]
        else:
            fully_shard(model)
            optimizers.append(WholeParameters(model, torch.optim.Adafactor, lr=0.1))  # type: ignore[arg-type]
    sum(model(torch.ones(1, WIDTH)).sum() for model in models).backward()  # type: ignore[union-attr]
    try:
        for each in optimizers[:: -1 if rank == 1 and not saves else 1]:
            each.step()
        for each in optimizers[:: -1 if rank == 1 else 1]:
            each.consolidate_state_dict() if isinstance(each, OSS) else each.state_dict()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("optimizer", ["OSS", "WholeParameters"])
def test_optimizers_of_equal_shapes_in_another_order(optimizer: str, saves: bool) -> None:
    """Models would get each other's updates, files each other's state."""
    for backend in ("gloo", "simulated") if saves == (optimizer == "OSS") else ("simulated",):
        for end in run_once(2, backend, _updates, optimizer, saves):
            assert {found[-1] for found in re.findall(f"of {optimizer} .", end)} == {"1", "2"}, (backend, end)


# ------------------------------------------------------------------ gradients that the program clears before a step
def _trained(door: str, clears: Callable[[int], bool], steps: int = 3) -> dict[str, torch.Tensor]:
    """Two layers in a unit, whose shards lose the gradient of the last listed one in some steps."""
    torch.manual_seed(6)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model = DOORS[door](model) if door else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).square().sum().backward()
        if clears(step):
            list(model.parameters())[-1].grad = None
        optimizer.step()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def _clears(rank: int, door: str) -> str:
    _trained(door, lambda step: True)  # on all ranks alike
    mine, truth = _trained(door, lambda step: step == 1), _trained("", lambda step: step == 1)
    for name, value in mine.items() if door in ("fully_shard", "dtensors") else ():
        torch.testing.assert_close(value, truth[name])
    try:
        _trained(door, lambda step: step == 1 and rank == 1)
    except OutOfStepError as error:
        return str(error)
    return ""


def _clears_at_last(rank: int) -> str:
    try:
        _trained("dtensors", lambda step: step == 2 and rank == 1)
    except RuntimeError as error:  # rank 0 waits in a collective of torch's
        return str(error)
    return ""


def test_a_step_that_is_refused_while_others_read_dtensors() -> None:
    """They waited for each other until the process group's timeout."""
    if DEVICE["name"] == "streams":
        pytest.skip("there the device waits for torch's collectives, which nobody watches, as with NCCL")
    refused = run_once(2, "gloo", _clears_at_last)[1]
    assert re.search(r"without the gradients of .*; rank 0 is in torch.distributed's wait_tensor", refused)


def _check_cleared(ends: list[str]) -> None:
    for end in ends:
        assert re.search(r"a step without the gradients of parameters? \S+ of the root, unit", end), end
        assert re.search(r"all_gather_into|gave up|agreement \(a step\)", end), end


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "torch_fsdp", "torch_fsdp_orig"])
def test_a_gradient_that_one_rank_clears(door: str, world_size: int) -> None:
    """Its part of the shards would stay behind."""
    _check_cleared(rank_pool(world_size, "simulated").run(_clears, door))
    if world_size == 2 and door == "fully_shard":
        _check_cleared(run_once(2, "gloo", _clears, "dtensors"))


def _one_rank_clears(rank: int, owner_does: bool) -> tuple[bool, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped, weight = ShardedDDP(model, optimizer), model[1].weight  # type: ignore[union-attr]
    before = weight.detach().clone()
    wrapped(torch.ones(2, 4) + rank).sum().backward()
    owned = [p for group in optimizer.partition_parameters()[rank] for p in group["params"]]
    if any(p is weight for p in owned) == owner_does:
        weight.grad = None
    optimizer.step()
    return torch.equal(weight, before), weight.flatten().tolist()


@pytest.mark.parametrize("owner_does", [True, False])
def test_a_gradient_counts_where_its_owner_has_it(owner_does: bool) -> None:
    """One that another rank clears is not missed; all ranks get the owner's result."""
    ends = rank_pool(2).run(_one_rank_clears, owner_does)
    assert [stayed for stayed, _ in ends] == [owner_does] * 2
    assert ends[0] == ends[1]
