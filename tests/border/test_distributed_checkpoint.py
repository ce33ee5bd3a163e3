"""``torch.distributed.checkpoint`` with shards: what it saves, and its functions that get and set state dicts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import shardkit
from shardkit import FSDP, OSS
from shardkit.errors import ConfigurationError, ShardkitError
from tests.beside import reread
from tests.border.strategies import GLOO, STRATEGIES, make_model, twins, wrapped
from tests.pools import on_ranks


def _stepped(rank: int, world_size: int, strategy: str) -> Any:
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01)
    t.backward()
    t.step()
    return t


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "sharded_ddp"])
@on_ranks(2)
def test_state_of_shards_is_refused_on_all_ranks(
    rank: int, world_size: int, strategy: str, tmp_path: Path
) -> None:
    t = _stepped(rank, world_size, strategy)
    state = t.optimizer.state_dict()
    copies = [
        state,
        copy.deepcopy(state),
        {"state": {k: v["exp_avg"].cpu() for k, v in state["state"].items()}},
    ]
    for k, saved in enumerate(copies):
        with pytest.raises(CheckpointException, match="gather_full_optim_state_dict"):
            dcp.save({"optim": saved}, checkpoint_id=f"{tmp_path}/{k}")
    dcp.save(
        {"optim": {"state": {0: {"exp_avg": torch.zeros_like(next(t.model.parameters()))}}}},
        checkpoint_id=tmp_path,
    )
    with pytest.raises(CheckpointException, match="gather_full_optim_state_dict"):
        dcp.load({"optim": {"state": {0: {"exp_avg": state["state"][0]["exp_avg"]}}}}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp", "unflattened"])
@on_ranks(*GLOO)
def test_a_file_for_each_rank(rank: int, world_size: int, strategy: str) -> None:
    """A file for each rank holds plain tensors, and goes on where it was."""
    t = _stepped(rank, world_size, strategy)
    saved = reread(t.optimizer.state_dict())
    assert {type(v) for s in saved["state"].values() for v in s.values()} <= {torch.Tensor}
    for state in (saved, t.optimizer.state_dict()):
        t.optimizer.load_state_dict(state)
        assert {type(v) for s in t.optimizer.state.values() for v in s.values()} <= {torch.Tensor}
    t.zero_grad()
    t.backward(1)
    t.step()
    t.assert_equal()
    full = t.model.gather_full_optim_state_dict(t.optimizer)
    if rank == 0:
        truth = t.plain_optimizer.state_dict()["state"]
        for k, state in truth.items():
            torch.testing.assert_close(full["state"][k]["exp_avg"], state["exp_avg"])


@on_ranks(2)
def test_a_consolidated_oss(rank: int, world_size: int, tmp_path: Path) -> None:
    """An OSS that was consolidated on all ranks has the same state on all ranks."""
    t = _stepped(rank, world_size, "sharded_ddp")
    state = t.optimizer.state_dict(all_ranks=True)
    dcp.save({"optim": state}, checkpoint_id=tmp_path)
    read = {"optim": t.plain_optimizer.state_dict()}
    dcp.load(read, checkpoint_id=tmp_path)
    for k, values in state["state"].items():
        torch.testing.assert_close(read["optim"]["state"][k]["exp_avg"], values["exp_avg"])


# ------------------------------------------------------------------------------------ models
SHARDS = [s for s in STRATEGIES if s != "sharded_ddp"]


def normalized() -> nn.Sequential:
    model = make_model()
    model.insert(1, nn.BatchNorm1d(7))
    return model


@on_ranks(2)
def test_local_state_dicts_are_refused_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    model = wrapped("fsdp", make_model())
    assert isinstance(model, FSDP)
    with pytest.raises(CheckpointException, match=r"Save FSDP.state_dict\(\)"):
        dcp.save({"model": model.local_state_dict()}, checkpoint_id=tmp_path)
    model.load_local_state_dict(model.local_state_dict())
    assert {type(v) for v in reread(model.local_state_dict()).values()} == {torch.Tensor}
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    read = {k: torch.zeros_like(v) for k, v in expected.items()}
    dcp.load({"model": read}, checkpoint_id=tmp_path)
    assert all(torch.equal(read[k], v) for k, v in expected.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(*GLOO)
def test_models_are_set_whole(rank: int, world_size: int, strategy: str) -> None:
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01, make=normalized)
    prefix = "module." if strategy == "sharded_ddp" else ""
    ways: list[tuple[dict[str, bool], bool]] = [
        ({}, True),
        ({"full_state_dict": True}, True),
        ({"full_state_dict": True, "cpu_offload": True}, True),
        ({"full_state_dict": True, "broadcast_from_rank0": True}, rank == 0),
        ({"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True}, rank == 0),
    ]
    for k, (flags, given) in enumerate(ways):
        values = {prefix + n: v + k for n, v in t.plain.state_dict().items()}
        passed = dict(values) if given else {}
        set_model_state_dict(t.model, passed, options=StateDictOptions(**flags))
        found = t.model.state_dict()
        assert list(found) == list(values)
        assert all(torch.equal(found[n], v) for n, v in values.items())
        t.backward(k)  # it trains on
        flags.pop("broadcast_from_rank0", None)
        found = get_model_state_dict(t.model, options=StateDictOptions(**flags))
        if flags.get("cpu_offload") and rank:
            assert not found  # torch's way
        else:
            assert all(
                torch.equal(found[n], v) for n, v in values.items() if "running" not in n and "num" not in n
            )
    lacking = {prefix + n: v for n, v in t.plain.state_dict().items() if n != "0.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        set_model_state_dict(t.model, lacking)


@pytest.mark.parametrize("strategy", [s for s in SHARDS if s != "in_place"])
@on_ranks(2)
def test_parts_of_models_are_refused(rank: int, world_size: int, strategy: str) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    model = wrapped(strategy, model)
    with pytest.raises(ConfigurationError, match="ignore_frozen_params"):
        get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    with pytest.warns(FutureWarning), pytest.raises(ConfigurationError, match="submodules"):
        get_model_state_dict(model, submodules={model[0]})


@pytest.mark.filterwarnings("ignore:Getting submodules:FutureWarning")
@pytest.mark.parametrize("dtensors", [False, True])
@on_ranks(2)
def test_parts_of_models_in_place_are_had_by_name(rank: int, world_size: int, dtensors: bool) -> None:
    plain = make_model()
    plain[0].requires_grad_(False)
    model = shardkit.fully_shard(copy.deepcopy(plain), dtensors=dtensors)
    trained = StateDictOptions(ignore_frozen_params=True)
    for words in ({"options": trained}, {"submodules": {0}}):
        found, wanted = (
            get_model_state_dict(m, **{k: {m[0]} if k == "submodules" else v for k, v in words.items()})
            for m in (model, plain)
        )
        assert {n: getattr(v, "full_tensor", v.clone)().tolist() for n, v in found.items()} == {
            n: v.tolist() for n, v in wanted.items()
        }


# ------------------------------------------------------------------------------------ optimizers
OPTIONS = [
    {},
    {"full_state_dict": True},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"strict": False},
]


# those over shards in place: tests/fsdp/test_torch_words.py
@pytest.mark.parametrize("strategy", [s for s in SHARDS if s != "in_place"])
@on_ranks(2)
def test_optimizers_over_shards_are_refused(rank: int, world_size: int, strategy: str) -> None:
    t = _stepped(rank, world_size, strategy)
    before = copy.deepcopy(t.optimizer.state_dict())
    truth = get_optimizer_state_dict(t.plain, t.plain_optimizer)
    for flags in OPTIONS:
        options = StateDictOptions(**flags)
        with pytest.raises(ConfigurationError, match="gather_full_optim_state_dict"):
            get_optimizer_state_dict(t.model, t.optimizer, options=options)
        with pytest.raises(ConfigurationError, match="gather_full_optim_state_dict"):
            get_state_dict(t.model, t.optimizer, options=options)
        with pytest.raises(ConfigurationError, match="gather_full_optim_state_dict"):
            set_optimizer_state_dict(t.model, t.optimizer, truth, options=options)
        with pytest.raises(ConfigurationError, match="gather_full_optim_state_dict"):
            set_state_dict(
                t.model,
                t.optimizer,
                model_state_dict=t.plain.state_dict(),
                optim_state_dict=truth,
                options=options,
            )
    for k, values in t.optimizer.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], before["state"][k]["exp_avg"])


def one_parameter() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=False))


@pytest.mark.parametrize("tiny", [False, True])
@on_ranks(*GLOO)
def test_optimizers_of_owners(rank: int, world_size: int, tiny: bool) -> None:
    """With one parameter, ranks after the first own nothing."""
    make = one_parameter if tiny else make_model
    t = twins(rank, world_size, "sharded_ddp", torch.optim.AdamW, lr=0.01, make=make)
    assert isinstance(t.optimizer, OSS)
    t.backward()
    t.step()
    t.zero_grad()
    for recipient in (None, 0):
        if recipient is not None:
            t.optimizer.consolidate_state_dict(recipient)
        with pytest.raises(
            ShardkitError, match=r"consolidate_state_dict\(-1\)" if world_size > 1 else "consolidate"
        ):
            get_optimizer_state_dict(t.model, t.optimizer)
        if world_size == 1:
            break
    truth = get_optimizer_state_dict(t.plain, t.plain_optimizer)["state"]
    for flags in OPTIONS:
        t.optimizer.consolidate_state_dict(-1)
        given = {k: v for k, v in flags.items() if k != "broadcast_from_rank0"}
        found = get_optimizer_state_dict(t.model, t.optimizer, options=StateDictOptions(**given))
        if not flags.get("flatten_optimizer_state_dict"):
            for name, values in truth.items():
                torch.testing.assert_close(found["state"][f"module.{name}"], values)
        for values in t.optimizer.optim.state.values():
            values["exp_avg"].zero_()
        passed = found if rank == 0 or not flags.get("broadcast_from_rank0") else {}
        set_optimizer_state_dict(t.model, t.optimizer, passed, options=StateDictOptions(**flags))
    t.backward(1)
    t.step()
    t.assert_equal()
