"""Optimizer and scaler state that is not this rank's, this model's or no state at all: refused on all ranks."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import FSDP, OSS, ShardedGradScaler, fully_shard, sharding_of
from shardkit.errors import ConfigurationError, RankMismatchError
from tests.beside import reread
from tests.border.strategies import STRATEGIES, batch, twins
from tests.doors import through
from tests.pools import on_ranks, rank_pool

SHARDS = [s for s in STRATEGIES if s != "sharded_ddp"]


def _everybodys(state: Any, world_size: int) -> list[Any]:
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, state)
    return found


def _parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", SHARDS)
@on_ranks(2)
def test_state_of_other_shards(rank: int, world_size: int, strategy: str) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01)
    t.backward()
    t.step()
    if rank == 0:  # what one rank wraps for itself makes no other one wait
        FSDP(torch.nn.Linear(2, 2), group=alone)
    t.zero_grad()
    t.backward(2)
    t.step()
    own = reread(t.optimizer.state_dict())
    everybody = _everybodys(own, world_size)
    larger, cut = copy.deepcopy(own), copy.deepcopy(own)
    for k in larger["param_groups"]:
        k._metadata["shardkit_shards"][0][1] = 5
    for k in cut["param_groups"]:
        del k._metadata["shardkit_shards"]  # of before it was noted
    cut["state"][0]["exp_avg"] = cut["state"][0]["exp_avg"].reshape(-1)[:1].repeat(3)
    swapped = copy.deepcopy(everybody[1] if rank == 0 else own)  # one rank is wrong
    for k in swapped["param_groups"]:
        k["shardkit_shards"] = k._metadata.pop("shardkit_shards")  # as 0.2 wrote it
    same_for_all = everybody[0]  # what a trainer does that saves on rank 0 only
    cases = [
        (swapped, "rank 0 has loaded optimizer state of rank 1"),
        (same_for_all, "rank 1 has loaded optimizer state of rank 0"),
        (larger, "of world size 5, this is 2"),
        (cut, r"'exp_avg' of shape \(3,\)"),
    ]
    t.zero_grad()
    t.backward(1)
    for is_new in (False, True):
        for state, words in cases:
            optimizer = torch.optim.AdamW(t.model.parameters(), lr=0.01) if is_new else t.optimizer
            optimizer.load_state_dict(copy.deepcopy(state))
            before = _parameters(t.model)
            with pytest.raises(ConfigurationError, match=words):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, _parameters(t.model), strict=True))
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=0.01)
    t.optimizer.load_state_dict(own)
    t.step()
    t.assert_equal()
    assert {type(v) for s in t.optimizer.state.values() for v in s.values()} == {torch.Tensor}
    full: Any = sharding_of(t.model).gather_full_optim_state_dict(t.optimizer)
    for found in (
        t.optimizer.param_groups[0],
        t.optimizer.state_dict()["param_groups"][0],
        (full or own)["param_groups"][0],
    ):
        assert "shardkit_shards" not in found


@on_ranks(2)
def test_state_of_other_ranks_dtensors(rank: int, world_size: int) -> None:
    """Rows of the same number on all ranks would be taken as they are; of others, one rank would fail alone."""
    for width in (8, 7):
        model = fully_shard(torch.nn.Linear(5, width), dtensors=True)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for _ in range(2)]
        model(batch(rank)).sum().backward()
        optimizers[0].step()
        own, unmarked = pickle.dumps(optimizers[0].state_dict()), optimizers[0].state_dict()
        if rank == 1 and width == 7:
            unmarked["state"][0]["exp_avg"] = unmarked["state"][1]["exp_avg"]
        del unmarked["param_groups"][0]._metadata
        states = [(_everybodys(own, world_size)[0], "rank 1 has loaded optimizer state of rank 0")]
        if width == 7:
            states.append((pickle.dumps(unmarked), r"rank 1 has loaded .*'exp_avg' of shape \(3,\)"))
        for optimizer in optimizers:
            before = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
            for state, words in states:
                optimizer.load_state_dict(pickle.loads(state))
                with pytest.raises(ConfigurationError, match=words):
                    optimizer.step()
            assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
            optimizer.load_state_dict(pickle.loads(own))
            optimizer.step()


@on_ranks(2, 3, (2, "simulated"))
def test_ranks_of_an_oss_load_the_same(rank: int, world_size: int) -> None:
    t = twins(rank, world_size, "sharded_ddp", torch.optim.SGD, lr=0.1, momentum=0.9)
    assert isinstance(t.optimizer, OSS)
    states = []
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        t.step()
        t.optimizer.consolidate_state_dict(-1)
        states.append(copy.deepcopy(t.optimizer.state_dict()))
    later, slower, broken = states[1], copy.deepcopy(states[1]), copy.deepcopy(states[1])
    slower["param_groups"][0]["lr"] = 0.05
    broken["state"][3]["momentum_buffer"] = torch.ones(9)
    before = copy.deepcopy(t.optimizer.local_state_dict())
    is_last = rank == world_size - 1
    for other, error, words in [
        (states[0], RankMismatchError, f"the state of parameter 0 on rank 0 .* on rank {world_size - 1}"),
        (slower, RankMismatchError, f"group 0 on rank 0 .* on rank {world_size - 1}"),
        (broken, ConfigurationError, r"parameter 3 .* shape \(9,\)"),
        ({"model": {}}, ConfigurationError, "no optimizer state"),
    ]:
        with pytest.raises(error, match=words):
            t.optimizer.load_state_dict(other if is_last else later)
        assert str(t.optimizer.local_state_dict()) == str(before)
    t.optimizer.load_state_dict(later)
    t.zero_grad()
    t.backward(2)
    t.step()
    t.assert_equal()


def test_state_of_a_scaler() -> None:
    scaler = ShardedGradScaler(init_scale=8.0)
    good = scaler.state_dict()
    for wrong, words in [
        ({}, "no state of a gradient scaler"),
        ([1], "no state of a gradient scaler"),
        ({**good, "scale": float("nan")}, "'scale' of this"),
        ({**good, "scale": torch.ones(2)}, "'scale' of this"),
        ({**good, "growth_factor": 0.5}, "'growth_factor' of this"),
        ({**good, "backoff_factor": 2}, "'backoff_factor' of this"),
        ({**good, "growth_interval": 0}, "'growth_interval' of this"),
        ({**good, "_growth_tracker": -1}, "'_growth_tracker' of this"),
        ({k: v for k, v in good.items() if k != "scale"}, "'scale' .* is missing"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            scaler.load_state_dict(wrong)  # type: ignore[arg-type]
        assert scaler.state_dict() == good
    scaler.load_state_dict({**good, "scale": torch.tensor(4.0)})
    assert float(scaler.get_scale()) == 4.0
    ShardedGradScaler(enabled=False).load_state_dict({})


@pytest.mark.parametrize("door", ["FSDP", "unflattened", "fully_shard"])
@on_ranks(1, 2, 3)
def test_full_state_of_other_units(rank: int, world_size: int, door: str) -> None:
    """Ids depend on what was a unit; layers of one shape would get each other's state."""
    trained: dict[str, Any] = {}
    for unit in ("2", "0", "none"):  # what the second one takes from the first was saved with other units
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
        model = through(door, model, *([unit] if unit != "none" else []))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        api = sharding_of(model)
        if trained:
            model.load_state_dict(trained["model"])
            box = [trained["optimizer"]]
            dist.broadcast_object_list(box, 0)
            optimizer.load_state_dict(api.get_shard_from_optim_state_dict(reread(box[0])))
        else:
            _train(model, optimizer, range(2), [0, 1])
            trained = {"model": model.state_dict(), "optimizer": api.gather_full_optim_state_dict(optimizer)}
        _train(model, optimizer, range(2, 4), [0, 1])
        truth = trained.setdefault("truth", model.state_dict())
        torch.testing.assert_close(dict(model.state_dict()), dict(truth), msg=lambda m: f"{unit}: {m}")  # noqa: B023


# ------------------------------------------------------------------ files of 0.2
# As version 0.2 saved them on 2 ranks after 3 steps, through each door: state_dict() and the optimizer's full state.
SAVED = Path(__file__).with_name("saved_by_0_2.zip")


def _built(door: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)), nn.Linear(7, 3)
    )
    return through(door, model, "2") if door else model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, batches: list[int]) -> None:
    """Each of the two batches on a rank of two, or all on each."""
    for step in steps:
        optimizer.zero_grad()
        for r in batches:
            generator = torch.Generator().manual_seed(10 * step + r)
            loss = model(torch.randn(4, 5, generator=generator)).square().mean() / len(batches)
            loss.backward()
        optimizer.step()


def _loads_files_of_0_2(rank: int, world_size: int, new: str) -> None:
    with zipfile.ZipFile(SAVED) as archive:
        data = archive.read("saved.pt")
    files, truth = torch.load(io.BytesIO(data), weights_only=True), _built()
    plain = torch.optim.AdamW(truth.parameters(), lr=0.01)
    _train(truth, plain, range(3), [0, 1])  # numbers in the model's order, which units don't have
    named = torch.optim.AdamW([*truth.named_parameters()][::-1], lr=0.01)  # it says that its order is another
    named.state.update(plain.state)
    for by, saved in (("numbers", plain), ("names", named)):
        files[by] = copy.deepcopy({"model": truth.state_dict(), "optimizer": saved.state_dict()})
    _train(truth, plain, range(3, 5), [0, 1])
    for old, saved in files.items():
        model = _built(new)
        model.load_state_dict(saved["model"])
        if new == "dtensors":
            torch.testing.assert_close(model[3].bias.full_tensor(), saved["model"]["3.bias"])
            with pytest.raises(ConfigurationError, match="set_optimizer_state_dict"):
                sharding_of(model).get_shard_from_optim_state_dict(saved["optimizer"])
            continue
        state = sharding_of(model).get_shard_from_optim_state_dict(saved["optimizer"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        optimizer.load_state_dict(state)
        _train(model, optimizer, range(3, 5), [rank] if world_size == 2 else [0, 1])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, truth.state_dict()[name], msg=lambda m: f"{old}, {new}: {m}")  # noqa: B023
        if world_size > 1 and old == "FSDP" and new != "FSDP":
            # its shards had several parameters: their order is taken from the model, and compared
            optimizer = torch.optim.AdamW([*model.parameters()][::-1], lr=0.01)
            optimizer.load_state_dict(state)
            with pytest.raises(ConfigurationError, match=r"rank 0 has loaded optimizer state of a shard of"):
                _train(model, optimizer, range(1), [rank])


@pytest.mark.parametrize("new", ["FSDP", "unflattened", "fully_shard", "dtensors"])
def test_files_of_0_2(new: str) -> None:
    for world_size in (2,) if new == "dtensors" else (1, 2, 3):
        backend = "gloo" if new == "dtensors" or world_size == 1 else "simulated"
        rank_pool(world_size, backend).run(_loads_files_of_0_2, world_size, new)
