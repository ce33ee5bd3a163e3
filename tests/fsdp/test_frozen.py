"""Frozen values that stay gathered (``ReshardPolicy(frozen="keep")``), beside one process and counted on the wire."""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import ConfigurationError, LifecycleError, OutOfStepError, ReshardPolicy, sharding_of, summary
from tests.beside import assert_same, mean_square, steps_beside
from tests.doors import DOORS, through
from tests.figures.counters import OperationCounter
from tests.figures.gpt import AdaptedLinear
from tests.fsdp.test_extensions import Quantized
from tests.pools import DEVICE, on_ranks, rank_pool, run_once

WIDTH, LAYERS = 33, 4


class Adapted(AdaptedLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


class Stack(nn.Module):
    def __init__(self, again: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Adapted(width, 3) for _ in range(LAYERS)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 2)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        out: torch.Tensor = self.head(self.frozen(x))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", ["unflattened", "fully_shard", "dtensors", "torch_fsdp_orig"])
@on_ranks(2)
def test_a_weight_of_two_units_is_frozen_through_either(rank: int, world_size: int, door: str) -> None:
    """The second one's parameters() lacked it, so that it trained on, silently."""
    plain, model = Tied(), Tied()
    wrapped = through(door, model, "one", "two")
    for m in (plain, model):
        assert len([*m.two.parameters()]) == 2
        m.two.requires_grad_(False)
    steps_beside(rank, world_size, wrapped, plain, mean_square)
    for m in (plain, model):
        m.one.requires_grad_()
    steps_beside(rank, world_size, wrapped, plain, mean_square)
    assert_same(wrapped, plain)


def _sharded(model: Stack, wrap: str, **options: Any) -> nn.Module:
    return through(wrap, model, *[f"layers.{k}" for k in range(LAYERS)], "frozen", **options)


def _loss(model: nn.Module, seed: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(5, width, generator=generator)).square().mean()


class _Pair:
    """A sharded model and one process that sees what all ranks see."""

    def __init__(self, rank: int, wrap: str, again: bool, world_size: int, frozen: Any = "keep") -> None:
        self.rank, self.world_size = rank, world_size
        self.plain = Stack()
        self.model = _sharded(Stack(again), wrap, reshard=ReshardPolicy(frozen=frozen))
        self.optimizers = [self._adam(m) for m in (self.plain, self.model)]

    def _adam(self, model: nn.Module) -> torch.optim.Optimizer:
        # eps: the first steps of what is unfrozen would be mostly rounding
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)

    def step(self, number: int, micro_batches: int = 2) -> None:
        for k in range(micro_batches):
            seed = 1000 * number + 100 * k
            _loss(self.model, seed + self.rank).backward()
            for r in range(self.world_size):
                (_loss(self.plain, seed + r) / self.world_size).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        assert_same(self.model, self.plain, rtol=0)


def _kept(rank: int, wrap: str, again: bool, world_size: int, frozen: Any) -> None:
    pair = _Pair(rank, wrap, again, world_size, frozen)
    pair.step(0)
    trained = sum(p.numel() for p in pair.plain.parameters() if p.requires_grad) * 4
    with OperationCounter(world_size) as counter:
        pair.step(1, micro_batches=4)
    # nothing of the frozen part: what is trained, gathered twice and reduced once for each micro-batch, with padding
    assert counter.sent <= 4 * 4.2 * trained * (world_size - 1) / world_size
    with torch.no_grad():
        _loss(pair.model, 7)
    pair.step(2)
    pair.compare()  # summons, so that what is kept goes

    # frozen weights that are loaded, or are trained from now on, are seen
    other = {n: v.clone() for n, v in Stack().state_dict().items()}
    other["layers.1.base.weight"] += 0.5
    pair.plain.load_state_dict(other)
    sharding = sharding_of(pair.model)
    with torch.no_grad(), sharding.summon_full_params():
        for name, p in pair.model.named_parameters():
            p.copy_(other[name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")])
    pair.step(3)
    for model in (pair.plain, pair.model):
        for p in model.parameters():
            p.requires_grad_(True)
    pair.optimizers = [pair._adam(m) for m in (pair.plain, pair.model)]
    for number in (4, 5):
        pair.step(number)
    pair.compare()


@pytest.mark.parametrize("wrap", ["FSDP", "fully_shard", "dtensors"])
@pytest.mark.parametrize("frozen", ["keep", "host"])
def test_frozen_values_stay_and_are_right(wrap: str, frozen: str) -> None:
    rank_pool(2).run(_kept, wrap, wrap == "fully_shard", 2, frozen)
    for world_size in (1, 3, 4) if wrap == "FSDP" else ():
        rank_pool(world_size).run(_kept, wrap, True, world_size, frozen)


def _frozen_alone(rank: int, wrap: str, frozen: Any) -> list[int]:
    model = _sharded(Stack().requires_grad_(False), wrap, reshard=ReshardPolicy(frozen=frozen))
    sent = []
    for _ in range(3):
        with OperationCounter(2) as counter:
            model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        sent.append(counter.sent)
    return sent


@pytest.mark.parametrize("wrap", ["FSDP", "fully_shard", "dtensors"])
@pytest.mark.parametrize("frozen", ["keep", "host"])
def test_of_frozen_weights_nothing_is_sent_again(wrap: str, frozen: str) -> None:
    """Not a byte after the first step, with a backward to what is in front of them."""
    is_counted = DEVICE["name"] != "streams"  # other threads issue there
    for sent in rank_pool(2).run(_frozen_alone, wrap, frozen):
        assert sent[0] > 0 or not is_counted
        assert sent[1:] == [0, 0]


@pytest.mark.parametrize("wrap", ["FSDP", "fully_shard", "dtensors"])
@on_ranks(2, 3)
def test_each_unit_has_a_policy_of_its_own(rank: int, world_size: int, wrap: str) -> None:
    """Each unit keeps its frozen values as a function of its number says."""
    policies: list[Any] = ["reshard", "keep", "host", "keep", "host", "reshard"]
    plain, model = Stack(), Stack()

    def shard(part: nn.Module, number: int) -> nn.Module:
        return DOORS[wrap](part, reshard=ReshardPolicy(frozen=policies[number]))

    for k, layer in enumerate(model.layers):
        model.layers[k] = shard(layer, k)
    model.frozen = shard(model.frozen, LAYERS)  # type: ignore[assignment]
    whole = shard(model, LAYERS + 1)
    said = [
        unit.stays == "what is frozen" or unit.on_host == "what is frozen" for unit in summary(whole).units
    ]
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (plain, whole)
    ]
    for step in range(3):
        with OperationCounter(world_size) as counter:
            _loss(whole, 10 * step + rank).backward()
        for r in range(world_size):
            (_loss(plain, 10 * step + r) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert said == [False, False, True, True, True, True], summary(whole).units
    one, trained = WIDTH * WIDTH * 4, sum(p.numel() for p in plain.parameters() if p.requires_grad) * 4
    # of one layer's frozen weight, in forward and backward, and of what is trained
    sent = counter.sent * world_size / (world_size - 1)
    assert sent == 0 or 2 * one + 2.9 * trained <= sent <= 2.1 * one + 4.2 * trained, (sent, one, trained)
    assert_same(whole, plain, rtol=0)


def _packed(rank: int, frozen: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Frozen weights of a class that travels as codes of one byte."""
    plain = Stack(width=32)
    for layer in plain.layers:
        layer.base.weight = nn.Parameter(Quantized(layer.base.weight.detach()), requires_grad=False)
    model = _sharded(plain, "dtensors", reshard=ReshardPolicy(frozen=frozen))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        with OperationCounter(2) as counter:
            _loss(model, 10 * step + rank, 32).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with sharding_of(model).summon_full_params(writeback=False), torch.no_grad():
                assert model.frozen.weight.shape == (32, 32)
                for layer in model.layers:
                    layer.base.weight.zero_()  # what nobody keeps is no change
    trained = {n: p.full_tensor() for n, p in model.state_dict().items() if "up" in n or "down" in n}  # type: ignore[union-attr]
    return counter.sent, trained


def test_frozen_values_of_classes_with_an_all_gather_of_their_own_stay_too() -> None:
    pool = rank_pool(2)
    given_back = pool.run(_packed, "reshard")
    for frozen in ("keep", "host"):
        for (sent, trained), (kept, same) in zip(given_back, pool.run(_packed, frozen), strict=True):
            torch.testing.assert_close(trained, same, rtol=0, atol=0)
            assert sent == 0 or sent - kept >= LAYERS * 32 * 32 / 2  # of a byte each


@on_ranks(2)
def test_frozen_values_are_given_back_on_request(rank: int) -> None:
    pair = _Pair(rank, "FSDP", False, 2)
    pair.step(0)
    stays = [unit.stays for unit in summary(pair.model).units]
    assert stays == ["to backward", *["what is frozen"] * LAYERS, "always"]
    frozen = pair.model.layers[0].base.weight
    with pytest.raises(LifecycleError), torch.no_grad():
        frozen.mul_(2)  # would be seen by forwards, and not be in the shards
    with OperationCounter(2) as before:
        pair.step(1)
    sharding_of(pair.model).reshard_frozen()
    with OperationCounter(2) as after:
        pair.step(2)
    # where ranks have streams, other threads issue, and the counter has nothing
    assert before.sent == 0 or after.sent - before.sent >= 0.9 * (LAYERS + 1) * WIDTH * WIDTH * 4 / 2
    pair.compare()


@on_ranks(2)
def test_frozen_values_on_the_host(rank: int) -> None:
    """Nothing of them is on the device between uses, nor sent between forward and backward over a mesh of ranks."""
    model = _sharded(Stack(), "fully_shard", reshard=ReshardPolicy(1, frozen="host"))
    for step in range(2):
        _loss(model, step).backward()
    held = [flat for state in sharding_of(model)._state.states() for flat in state.flats if not flat.trains]
    assert all(f.host is not None and f.store.gathered.untyped_storage().nbytes() == 0 for f in held)
    assert [unit.on_host for unit in summary(model).units] == ["", *["what is frozen"] * (LAYERS + 1)]
    sharding_of(model).reshard_frozen()
    assert all(f.host is None for f in held)


@on_ranks(2)
def test_frozen_values_that_change_while_gathered(rank: int) -> None:
    """What is given back, or outdated, while its unit is gathered, is gathered again."""
    plain, model = Stack(), _sharded(Stack(), "fully_shard", reshard=ReshardPolicy(False, frozen="keep"))
    for step in range(4):
        for each in (plain, model):
            for name, p in each.named_parameters():
                p.requires_grad_(step > 1 or "up" in name)
        for k in range(2):
            loss = _loss(model, 10 * step + k)
            sharding_of(model).reshard_frozen() if step == 1 else None
            loss.backward()
            _loss(plain, 10 * step + k).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert float(sharding_of(model).clip_grad_norm_(1.0)) == pytest.approx(float(expected), rel=1e-5)


def _alone(rank: int, door: str) -> tuple[str, str]:
    model = _sharded(Stack(), door, reshard=ReshardPolicy(frozen="keep"))
    for step in range(2):
        _loss(model, step).backward()
    try:
        if not rank:
            sharding_of(model).sharded_state_dict()
        _loss(model, 3).backward()
    except OutOfStepError as error:
        return str(error), traceback.format_exc()
    return "", ""


@pytest.mark.parametrize(
    ("door", "world", "backend"),
    [
        ("fully_shard", 2, "gloo"),
        ("fully_shard", 3, "simulated"),
        ("FSDP", 2, "simulated"),
        ("FSDP", 3, "gloo"),
    ],
)
def test_a_state_dict_of_kept_values_on_one_rank_alone(door: str, world: int, backend: str) -> None:
    """Refused where it is called, with what the other ranks do."""
    found = run_once(world, backend, _alone, door)
    assert all("sharded_state_dict() of frozen values that are kept" in said for said, _ in found)
    assert ".sharded_state_dict()" in found[0][1]


def _frozen_on(rank: int, door: str, ranks: tuple[int, ...]) -> str:
    """Freezes one parameter of a unit, so that its gradients are of another size, under no_sync first."""
    model = through(door, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    try:
        for step in range(3):
            if step and rank in ranks:
                next(p for p in model.parameters()).requires_grad_(False)
            with sharding_of(model).no_sync() if step == 1 else contextlib.nullcontext():
                model(torch.ones(1, WIDTH)).sum().backward()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("door", ["fully_shard", "dtensors"])
def test_what_one_rank_alone_freezes(door: str) -> None:
    """gloo would end a process that gets more than it asked for."""
    assert rank_pool(2).run(_frozen_on, door, (0, 1)) == ["", ""]
    for said in run_once(2, "gloo", _frozen_on, door, (1,)):
        assert re.search(r"backward through parameters .* [13] of 4 parameters trainable|gave up", said), said


@on_ranks(2)
def test_frozen_values_that_change_unseen(rank: int) -> None:
    """Values that are read into what ``state_dict`` gives, as torch.distributed.checkpoint does; memory replaced."""
    plain, model = Stack(), _sharded(Stack(), "dtensors", reshard=ReshardPolicy(frozen="keep"))
    with torch.no_grad():
        _loss(model, 0)
        for value in model.state_dict().values():
            value.to_local().detach().mul_(0.5)  # type: ignore[union-attr]
        for p in plain.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(_loss(model, 1), _loss(plain, 1))
        model = _sharded(plain, "FSDP", reshard=ReshardPolicy(frozen="keep"))
        before = _loss(model, 1)
        for p in model.parameters():
            p.data = p.data * 2 if not p.requires_grad else p.data
        assert not torch.equal(_loss(model, 1), before)
    with pytest.raises(ConfigurationError, match="'reshard', 'keep', 'host' or 'packed'"):
        ReshardPolicy(frozen="disk")  # type: ignore[arg-type]
