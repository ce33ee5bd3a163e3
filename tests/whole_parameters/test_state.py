"""State goes on at other world sizes, in other wrappings, and in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from shardkit import WholeParameters
from shardkit.errors import ConfigurationError, LifecycleError, RankMismatchError
from tests.pools import on_ranks, rank_pool
from tests.whole_parameters.nets import difference, net, train, wrap

RULES: list[Any] = [
    (("0.weight", "4.*"), torch.optim.Muon, {"lr": 0.05}),
    ("2", torch.optim.Adafactor, {"lr": 0.01}),
]
RULES[0] = (lambda n, p: p.ndim == 2 and n != "2.weight", *RULES[0][1:])


def part_of_training(
    rank: int, world_size: int, how: str, spec: Any, steps: range, before: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    model = net()
    if before is not None:
        model.load_state_dict(before[0])
    sharded = wrap(model, how)
    optimizer = (
        WholeParameters(sharded, spec)
        if isinstance(spec, list)
        else WholeParameters(sharded, spec[0], **spec[1])
    )
    if before is not None:
        given = copy.deepcopy(before[1])
        optimizer.load_state_dict(given)
        assert str(given) == str(before[1])
    train(sharded, optimizer, rank, world_size, steps=steps, closure=spec[0] is torch.optim.LBFGS)
    listed = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert {id(p) for p in optimizer.state} <= listed
    return sharded.state_dict(), optimizer.state_dict()


SPECS = {
    "rules": RULES,
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 4}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", SPECS)
def test_goes_on_elsewhere(name: str) -> None:
    spec = SPECS[name]
    truth, _ = part_of_training(0, 1, "plain", spec, range(4), None)
    at_2 = rank_pool(2, "simulated").run(part_of_training, 2, "fsdp", spec, range(1), None)[1]
    at_3 = rank_pool(3, "simulated").run(part_of_training, 3, "fully_shard", spec, range(1, 2), at_2)[2]
    at_4 = rank_pool(4, "simulated").run(part_of_training, 4, "hybrid", spec, range(2, 3), at_3)[3]
    values, _ = part_of_training(0, 1, "plain", spec, range(3, 4), at_4)
    assert difference(values, truth) <= 1e-6


def of_torch(rank: int, given: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    model = net()
    model.load_state_dict(given)
    sharded = wrap(model, "fsdp")
    optimizer = WholeParameters(sharded, torch.optim.Adafactor, lr=0.3)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(sharded, optimizer, rank, 2, steps=range(2, 3))
    return sharded.state_dict()


@pytest.mark.parametrize("named", [True, False])
def test_to_and_from_optimizers_of_torch(named: bool) -> None:
    """With names, in any order of parameters; without, in the model's."""
    spec = (torch.optim.Adafactor, {"lr": 0.01})
    truth, _ = part_of_training(0, 1, "plain", spec, range(3), None)
    plain = net()
    params: Any = [*plain.named_parameters()][::-1] if named else plain.parameters()
    adafactor = torch.optim.Adafactor(params, lr=0.01)
    train(plain, adafactor, steps=range(2))
    for values in rank_pool(2, "simulated").run(of_torch, plain.state_dict(), adafactor.state_dict()):
        assert difference(values, truth) <= 1e-6
    values, saved = rank_pool(2, "simulated").run(part_of_training, 2, "fsdp", spec, range(2), None)[0]
    plain.load_state_dict(values)
    adafactor = torch.optim.Adafactor(plain.named_parameters(), lr=0.7)
    adafactor.load_state_dict(saved)
    train(plain, adafactor, steps=range(2, 3))
    assert difference(plain.state_dict(), truth) <= 1e-6


@on_ranks((2, "simulated"))
def test_other_state_is_refused_on_all_ranks(rank: int) -> None:
    sharded = wrap(net(), "fsdp")
    optimizer = WholeParameters(sharded, torch.optim.Adafactor, lr=0.3)
    train(sharded, optimizer, rank, 2, steps=range(1))
    saved, before = optimizer.state_dict(), sharded.state_dict()
    other = copy.deepcopy(saved)
    if rank:
        other["param_groups"][0]["param_names"][0] = "nobody"
    with pytest.raises(ConfigurationError, match="nobody"):
        optimizer.load_state_dict(other)
    other = copy.deepcopy(saved)
    other["state"][0]["row_var"] += rank
    with pytest.raises(RankMismatchError, match="different optimizer state"):
        optimizer.load_state_dict(other)
    other = copy.deepcopy(saved)
    other["state"][0]["row_var"] = torch.ones(3)
    with pytest.raises(ConfigurationError, match=r"row_var.*shape"):
        optimizer.load_state_dict(other)
    optimizer.load_state_dict(saved)
    assert difference(optimizer.state_dict()["state"], saved["state"]) == 0.0
    assert difference(sharded.state_dict(), before) == 0.0
    only = optimizer.state_dict(recipient_rank=1)
    assert bool(only["state"]) == (rank == 1)


@on_ranks(2)
def test_functions_for_state_of_shards_are_refused(rank: int) -> None:
    """torch's functions, and those for state of shards, would find nothing or the wrong thing: on all ranks alike."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    sharded: Any = wrap(net(), "fsdp")
    optimizer = WholeParameters(sharded, torch.optim.Muon, lr=0.1)
    for ask in (
        lambda: get_optimizer_state_dict(sharded, optimizer),
        lambda: set_optimizer_state_dict(sharded, optimizer, {}),
        lambda: sharded.gather_full_optim_state_dict(optimizer),
    ):
        with pytest.raises(ConfigurationError, match=r"Save optimizer.state_dict\(\)"):
            ask()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(LifecycleError, match=r"state_dict\(\)"):
            copied(optimizer)
