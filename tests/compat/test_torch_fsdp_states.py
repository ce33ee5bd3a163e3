"""``shardkit.torch_fsdp``: states of models and optimizers, to and from torch's own FSDP1 and one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from torch import nn

from shardkit import sharding_of
from shardkit.errors import ConfigurationError, RankMismatchError
from shardkit.fsdp import gather_plain
from shardkit.torch_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
    state_dict,
)
from tests.compat.torch_fsdp_programs import (
    CPU,
    FSDP,
    INNER,
    TORCHS,
    Net,
    adam,
    loss_of,
    net,
    one_process,
    same,
    same_state,
    train,
    trained,
)
from tests.pools import on_ranks, rank_pool

UNITS: dict[str, Any] = {"auto_wrap_policy": INNER, "device_id": CPU}


# ------------------------------------------------------------ state dicts
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3)
def test_state_dicts_full_and_sharded(
    rank: int, world_size: int, use_orig_params: bool, tmp_path: Path
) -> None:
    plain, _ = one_process(world_size)
    model = trained(FSDP, rank, use_orig_params=use_orig_params)[0]
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        assert FSDP.get_state_dict_type(model).state_dict_config is full
        found = model.state_dict()
        outside = nn.ModuleDict({"a": model}).state_dict()
    assert [*outside] == [f"a.{n}" for n in found]
    same(found, dict(plain.state_dict()) if rank == 0 else {})
    fresh = FSDP(Net(), auto_wrap_policy=INNER, use_orig_params=use_orig_params).eval()
    fresh.load_state_dict(plain.state_dict())
    same(fresh.state_dict(), plain.state_dict())

    # a sharded one, through files, from torch's FSDP and back
    models = {FSDP: model, TORCHS: trained(TORCHS, rank, use_orig_params=use_orig_params)[0]}
    for kind, source in models.items():
        with kind.state_dict_type(source, StateDictType.SHARDED_STATE_DICT):
            dcp.save({"model": source.state_dict()}, checkpoint_id=f"{tmp_path}/{kind.__module__}")
    for kind, source in ((TORCHS, FSDP), (FSDP, TORCHS), (FSDP, FSDP)):
        target = kind(Net(), auto_wrap_policy=INNER, device_id=CPU, use_orig_params=use_orig_params).eval()
        with torch.no_grad():
            for p in target.parameters():
                p.zero_()
        with kind.state_dict_type(target, StateDictType.SHARDED_STATE_DICT):
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=f"{tmp_path}/{source.__module__}")
            target.load_state_dict(state["model"])
        assert loss_of(target, 0, 9).item() == pytest.approx(loss_of(plain, 0, 9).item(), abs=1e-5)


# ------------------------------------------------------------ optimizer state
def _goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Any, plain: Net) -> None:
    """Two more steps; the parameters are then one process's."""
    train(model, ranks, optimizer, range(3, 5))
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3)
def test_optimizer_states_go_both_ways(rank: int, world_size: int, use_orig_params: bool) -> None:
    plain, plain_optimizer = one_process(world_size)
    options = {**UNITS, "use_orig_params": use_orig_params}
    model, optimizer, _ = trained(FSDP, rank, use_orig_params=use_orig_params)
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    same_state(plain, plain_optimizer, found)
    assert FSDP.full_optim_state_dict(model, optimizer) == {} or rank == 0
    other, other_optimizer, _ = trained(TORCHS, rank)
    theirs_too = TORCHS.optim_state_dict(other, other_optimizer)
    same_state(plain, plain_optimizer, theirs_too)
    assert {k: type(v) for k, v in found["state"]["inner.0.weight"].items()} == {
        k: type(v) for k, v in theirs_too["state"]["inner.0.weight"].items()
    }
    by_number = FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain)
    of_plain = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    weights = plain.state_dict()
    after = copy.deepcopy(plain)
    after_optimizer = adam(after)
    after_optimizer.load_state_dict(copy.deepcopy(by_number))
    train(after, range(world_size), after_optimizer, range(3, 5))

    ways = [
        lambda m, o: FSDP.optim_state_dict_to_load(m, o, theirs_too),
        lambda m, o: FSDP.optim_state_dict_to_load(m, o, of_plain),
        lambda m, o: FSDP.shard_full_optim_state_dict(found, m),
        lambda m, o: FSDP.scatter_full_optim_state_dict(found if rank == 0 else None, m, optim=o),
        lambda m, o: FSDP.flatten_sharded_optim_state_dict(
            FSDP.sharded_optim_state_dict(model, optimizer), m, o
        ),
    ]
    for k, way in enumerate(ways):
        target = FSDP(net(), **options)
        target.load_state_dict(weights)
        target_optimizer = adam(target)
        if k == 0:
            config = FullOptimStateDictConfig(rank0_only=False)
            FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT, None, config)
        target_optimizer.load_state_dict(way(target, target_optimizer))
        _goes_on(target, target_optimizer, [rank], after)
    target = TORCHS(net(), **options)
    target.load_state_dict(weights)
    target_optimizer = adam(target)
    target_optimizer.load_state_dict(TORCHS.optim_state_dict_to_load(target, target_optimizer, found))
    _goes_on(target, target_optimizer, [rank], after)


@on_ranks(2, 3)
def test_torchs_functions_for_state_dicts(rank: int, world_size: int, tmp_path: Path) -> None:
    """get_state_dict and set_state_dict, through files too; ShardedTensors of torch's FSDP as they are."""
    plain, plain_optimizer = one_process(world_size)
    options = {**UNITS, "use_orig_params": world_size == 3}
    model, optimizer, _ = trained(FSDP, rank, use_orig_params=world_size == 3)
    full = state_dict.StateDictOptions(full_state_dict=True)
    found, of_optimizer = state_dict.get_state_dict(model, optimizer, options=full)
    same(found, plain.state_dict())
    same_state(plain, plain_optimizer, of_optimizer)
    first = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_first = state_dict.get_state_dict(model, optimizer, options=first)
    assert [len(d) > 0 for d in on_first] == [rank == 0] * 2
    dcp.save(
        dict(zip("mo", state_dict.get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path
    )
    after = copy.deepcopy(plain)
    after_optimizer = adam(after)
    after_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    train(after, range(world_size), after_optimizer, range(3, 5))

    other, other_optimizer, _ = trained(TORCHS, rank, use_orig_params=False)
    with TORCHS.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        torchs = other.state_dict(), TORCHS.optim_state_dict(other, other_optimizer)
    assert type(torchs[0]["last.weight"]).__name__ == "ShardedTensor"
    for k in range(4):
        target = FSDP(net(), **options)
        target_optimizer = adam(target)
        start = [p.detach().clone() for p in target.parameters()]
        loaded = dict(zip("mo", state_dict.get_state_dict(target, target_optimizer), strict=True))
        assert not target_optimizer.state
        assert all(torch.equal(a, b) for a, b in zip(start, target.parameters(), strict=True))
        how = None
        if k == 0:
            dcp.load(loaded, checkpoint_id=tmp_path)
        elif k == 1:
            loaded = {"m": on_first[0], "o": on_first[1]}
            how = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        else:
            loaded = dict(zip("mo", torchs if k == 2 else (found, of_optimizer), strict=True))
        state_dict.set_state_dict(
            target, target_optimizer, model_state_dict=loaded["m"], optim_state_dict=loaded["o"], options=how
        )
        _goes_on(target, target_optimizer, [rank], after)
    fresh = net()
    assert state_dict.get_model_state_dict(fresh).keys() == fresh.state_dict().keys()
    for alone in (FSDP(net(), **options), fresh):  # without values for the model
        start = [p.detach().clone() for p in alone.parameters()]
        its = adam(alone)
        state_dict.set_state_dict(alone, its, model_state_dict={}, optim_state_dict=of_optimizer)
        same_state(plain, plain_optimizer, state_dict.get_optimizer_state_dict(alone, its, options=full))
        assert all(map(torch.equal, start, alone.parameters()))
    for how in (full, state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        compiled: Any = torch.compile(FSDP(net(), **options), backend="eager")  # names have more in them
        state_dict.set_model_state_dict(compiled, dict(found), options=how)
        same(state_dict.get_model_state_dict(compiled, options=full), found)
    with pytest.raises(ConfigurationError, match="ignore_frozen_params"):
        state_dict.get_model_state_dict(model, options=state_dict.StateDictOptions(ignore_frozen_params=True))


@on_ranks(2)
def test_only_the_first_rank_has_the_state(rank: int, world_size: int) -> None:
    """Only one rank keeps and brings the state; a part of the model is no unit, and the outermost module neither."""
    plain = nn.Sequential(net(), nn.Linear(4, 4))
    model = nn.Sequential(FSDP(copy.deepcopy(plain[0])), copy.deepcopy(plain[1]))
    plain_optimizer, optimizer = adam(plain), adam(model)
    train(plain, range(world_size), plain_optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        for p in model[1].parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config)
    found = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        same_state(plain, plain_optimizer, found)
    before = copy.deepcopy(optimizer.state_dict())
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
    after = optimizer.state_dict()
    assert [g["params"] for g in loaded["param_groups"]] == [g["params"] for g in after["param_groups"]]
    for index, values in before["state"].items():
        same(after["state"][index], values, 0.0)


# ------------------------------------------------------------ what ranks have of an optimizer
def _other_orders(rank: int, world_size: int) -> None:
    """One rank made its optimizer of the parameters the other way round: states are by names."""
    plain, plain_optimizer = one_process(world_size)
    model = FSDP(net(), auto_wrap_policy=INNER, device_id=CPU, use_orig_params=True)

    def turned(target: nn.Module) -> torch.optim.Optimizer:
        params = [*target.parameters()]
        return torch.optim.AdamW(params[::-1] if rank else params, lr=0.01)

    optimizer = turned(model)
    train(model, [rank], optimizer)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    same_state(plain, plain_optimizer, full)
    weights = copy.deepcopy(plain.state_dict())
    train(plain, range(world_size), plain_optimizer, range(3, 5))
    cut = FSDP.sharded_optim_state_dict(model, optimizer)
    for way in (
        lambda m, o: FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, m, optim=o),
        lambda m, o: FSDP.flatten_sharded_optim_state_dict(cut, m, o),
    ):
        target = FSDP(net(), auto_wrap_policy=INNER, device_id=CPU, use_orig_params=True)
        target.load_state_dict(weights)
        other = turned(target)
        other.load_state_dict(way(target, other))
        _goes_on(target, other, [rank], plain)
    for gather in (gather_plain, sharding_of(model).gather_full_optim_state_dict):  # these are by numbers
        with pytest.raises(ConfigurationError, match=r"optimizer of rank 1 has .* another order"):
            gather(optimizer, True) if gather is gather_plain else gather(optimizer)


def _lacking(rank: int, world_size: int) -> None:
    """One rank has no state of a parameter, or not the parameter."""
    model, optimizer, _ = trained(FSDP, rank, use_orig_params=True)
    if rank == 1:
        del optimizer.state[next(iter(model.parameters()))]["exp_avg"]
    gathers: list[Callable[[], Any]] = [
        lambda: FSDP.full_optim_state_dict(model, optimizer),
        lambda: gather_plain(optimizer, rank == 0),
        lambda: sharding_of(model).gather_full_optim_state_dict(optimizer),
    ]
    for gather in gathers:
        with pytest.raises(
            ConfigurationError, match=r"rank 1 has no optimizer state 'exp_avg' of .*first\.weight"
        ):
            gather()
    optimizer = torch.optim.AdamW([*model.parameters()][rank:], lr=0.01)
    with pytest.raises(RankMismatchError, match=r"parameter 'first\.weight' in group 0"):
        optimizer.step()


def _as_torch_has_it(rank: int, world_size: int) -> None:
    """What the user passed stays as it was; state dicts are equal to torch's, and without groups where these are."""
    plain, plain_optimizer = one_process(world_size)
    model, optimizer, _ = trained(FSDP, rank)
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    groups: list[Any] = [{"params": [*model.parameters()], "betas": (0.9, 0.99)}]
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        FSDP.shard_full_optim_state_dict(found, model, optim_input=groups)
    of_plain: list[Any] = [{"params": [*plain.parameters()]}]
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain, optim_input=of_plain)
    assert [*groups[0], *of_plain[0]] == ["params", "betas", "params"]
    theirs = plain_optimizer.state_dict()["param_groups"][0]
    own = optimizer.state_dict()
    assert {**own["param_groups"][0], "params": theirs["params"]} == theirs
    without = FSDP.optim_state_dict(model, optimizer, {"state": own["state"]})
    assert without.keys() == {"state"}
    to_load = FSDP.optim_state_dict_to_load(model, optimizer, without)
    assert to_load.keys() == {"state"}
    of_sgd = {"param_groups": found["param_groups"]}  # as DCP has it where no parameter has state
    assert FSDP.optim_state_dict_to_load(model, optimizer, of_sgd)["state"] == {}
    assert FSDP.rekey_optim_state_dict(of_sgd, OptimStateKeyType.PARAM_ID, plain)["state"] == {}
    for part in (
        {**to_load, "param_groups": own["param_groups"]},
        FSDP.scatter_full_optim_state_dict(without if rank == 0 else None, model, optim=optimizer),
    ):
        optimizer.load_state_dict(part)
        same_state(plain, plain_optimizer, FSDP.full_optim_state_dict(model, optimizer, rank0_only=False))
    with pytest.raises(ConfigurationError, match="passed no optimizer state"):
        FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer)


def _groups_of_the_saved_state(rank: int, world_size: int) -> None:
    """Where no optimizer is passed its groups are those of the state, as in torch; nobody says which they were."""
    parts = []
    for kind in (TORCHS, FSDP):
        model, _, _ = trained(kind, rank)
        first, *others = model.parameters()
        optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.5}, {"params": [first]}], lr=0.1)
        train(model, [rank], optimizer)
        full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
        scattered = kind.scatter_full_optim_state_dict(full if rank == 0 else None, model)
        for part in (kind.shard_full_optim_state_dict(full, model), scattered):
            optimizer.load_state_dict(part)
            again = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
            assert again["param_groups"] == full["param_groups"]
            for name, state in full["state"].items():
                same(again["state"][name], state)
        parts.append(full)
    assert [sorted(g["params"]) for g in parts[0]["param_groups"]] == [
        sorted(g["params"]) for g in parts[1]["param_groups"]
    ]


@pytest.mark.parametrize("program", [_other_orders, _lacking, _as_torch_has_it, _groups_of_the_saved_state])
def test_what_ranks_have_of_an_optimizer(program: Callable[..., None]) -> None:
    rank_pool(2).run(program, 2)


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local_state_dicts(rank: int, world_size: int, use_orig_params: bool, tmp_path: Path) -> None:
    """A file of each rank's own, which loads to the bit where it was made, and into no other rank."""
    options = {**UNITS, "use_orig_params": use_orig_params}
    model, other = FSDP(net(), **options), nn.ModuleDict({"inner": FSDP(net(), **options)})
    optimizer, follows = adam(model), adam(other)
    train(model, [rank], optimizer)
    before = model.state_dict()
    config = torch.distributed.fsdp.LocalStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, config):
        of_optimizer = FSDP.optim_state_dict(model, optimizer)  # as accelerate saves it beside the files
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        dist.barrier()
        loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        others = torch.load(tmp_path / f"{(rank + 1) % world_size}.pt")
    assert sum(v.numel() for v in loaded.values()) < sum(v.numel() for v in before.values())
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(ConfigurationError, match="rank"):
            other["inner"].load_state_dict(others)
        other["inner"].load_state_dict(loaded)
        FSDP.optim_state_dict_to_load(other["inner"], follows, of_optimizer, load_directly=True)
    same(other["inner"].state_dict(), before, 0.0)
    same(model.state_dict(), before, 0.0)
    assert train(other["inner"], [rank], follows) == train(model, [rank], optimizer)
    same(other["inner"].state_dict(), model.state_dict(), 0.0)


@on_ranks(2, 3)
def test_local_state_dicts_of_a_module_that_holds_units(rank: int, world_size: int) -> None:
    """Loading took shards for full values where the outermost module was no FSDP module."""

    def holder() -> nn.ModuleDict:
        return nn.ModuleDict({"a": FSDP(net(), auto_wrap_policy=INNER), "b": nn.ModuleList([FSDP(net())])})

    model, other = holder(), holder()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.add_(k + rank)
    wanted = model.state_dict()
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    FSDP.set_state_dict_type(other, StateDictType.LOCAL_STATE_DICT)
    own = model.state_dict()
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, own)
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    with pytest.raises(ConfigurationError, match="the state dict is of rank"):
        other.load_state_dict(told[(rank + 1) % world_size])
    same(dict(other.named_parameters()), before, 0.0)
    assert not any(other.load_state_dict(own))
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    same(other.state_dict(), wanted, 0.0)
    other.load_state_dict(net_of_holder := {k: v * 2 for k, v in wanted.items()})  # and full ones again
    same(other.state_dict(), net_of_holder, 0.0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@on_ranks(2)
def test_what_is_not_sharded_is_no_copy(rank: int, kind: StateDictType, use_orig_params: bool) -> None:
    """As in any module, and in torch's: buffers and ignored parameters of a state dict are the model's own memory."""
    made = net()
    ignored = [made.last, made.inner[0]]
    model = FSDP(made, auto_wrap_policy=INNER, ignored_modules=ignored, use_orig_params=use_orig_params)
    for prefix in ("", "of."):
        with FSDP.state_dict_type(model, kind):
            found = model.state_dict(prefix=prefix)
        own = {
            "last.weight": made.last.weight,
            "last.bias": made.last.bias,
            "norm.running_mean": made.norm.running_mean,
        }
        for name, tensor in {**own, "inner.0.weight": ignored[1].weight}.items():
            assert found[prefix + name].data_ptr() == tensor.data_ptr(), name
            assert not found[prefix + name].requires_grad
    with pytest.raises(ConfigurationError, match="Expected state_dict_config of type FullStateDictConfig"):
        FSDP.set_state_dict_type(
            model, StateDictType.FULL_STATE_DICT, torch.distributed.fsdp.LocalStateDictConfig()
        )


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("kind", [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
@pytest.mark.parametrize("optim", [adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_checkpoint_is_read_into_an_optimizer_that_never_stepped(
    rank: int, use_orig_params: bool, kind: StateDictType, optim: Any, has_stepped: bool, tmp_path: Path
) -> None:
    """As accelerate and Trainer resume: what is not in the state to be filled is not read, without a word."""
    make = optim if optim is adam else lambda m: optim(m.parameters())
    options = {**UNITS, "use_orig_params": use_orig_params}
    model = FSDP(net(), **options)
    optimizer = make(model)
    if has_stepped:
        train(model, [rank], optimizer)
    elif rank == 0:  # a gradient on one rank alone
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    module = net()
    before = make(module)
    resumed = FSDP(module, **options)
    follows = before if use_orig_params else make(resumed)
    resumed.load_state_dict(model.state_dict())
    FSDP.set_state_dict_type(model, kind)
    FSDP.set_state_dict_type(resumed, kind)
    dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    assert {p.grad is None for p in model.parameters()} == {not has_stepped and rank > 0}
    model.zero_grad()
    state = {"optimizer": FSDP.optim_state_dict(resumed, follows)}
    assert not follows.state
    dcp.load(state, checkpoint_id=tmp_path)
    FSDP.optim_state_dict_to_load(resumed, follows, state["optimizer"], load_directly=True)
    assert train(resumed, [rank], follows) == train(model, [rank], optimizer)


class Prepared(torch.optim.Optimizer):
    """Hands on to another one, as what accelerate's ``prepare`` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state: Any = property(lambda self: self.optimizer.state)
    param_groups: Any = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("has_stepped", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RAdam", "Rprop", "ASGD"])
@on_ranks(2)
def test_a_checkpoint_is_read_into_a_prepared_optimizer(
    rank: int, use_orig_params: bool, has_stepped: bool, kind: str, tmp_path: Path
) -> None:
    """It was read into nothing, in silence: training went on without moments."""
    models, optimizers, state = [], [], {}
    make = getattr(torch.optim, kind)
    for number in range(2):
        module = net()
        before = make(module.parameters(), lr=0.1)
        model = FSDP(module, auto_wrap_policy=INNER, use_orig_params=use_orig_params)
        models.append(model)
        optimizers.append(Prepared(before if use_orig_params else make(model.parameters(), lr=0.1)))
        if number == 0 and has_stepped:
            train(model, [rank], optimizers[0])
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        state["optimizer"] = FSDP.optim_state_dict(model, optimizers[number])
        (dcp.load if number else dcp.save)(state, checkpoint_id=tmp_path)
    models[1].load_state_dict(models[0].state_dict())
    FSDP.optim_state_dict_to_load(models[1], optimizers[1], state["optimizer"], load_directly=True)
    assert train(models[1], [rank], optimizers[1]) == train(models[0], [rank], optimizers[0])


class Hidden(nn.Linear):
    """Saves other values than it has, as a module that leaves padding out, or scales."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("scale", torch.ones(4))
        self.table = nn.Parameter(torch.ones(6, 2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"], destination[f"{prefix}table"] = torch.zeros(4), self.table.detach()[:4]


@on_ranks(2, 3)
def test_what_a_module_saves_in_place_of_its_own_stays(rank: int) -> None:
    """The model's own buffers and ignored parameters took its place."""
    made = Hidden()
    found = FSDP(made, ignored_states=[made.table]).state_dict()
    assert found["scale"].sum() == 0
    assert found["table"].shape == (4, 2)
