"""State of other parameters, and shards of other ranks, are refused on all ranks before anything is taken."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.errors import ConfigurationError
from tests.doors import linears, through
from tests.pools import rank_pool


def model_of(width: int = 3) -> nn.Sequential:
    return linears(5, width, 2)


def refusal(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except ConfigurationError as error:
        return str(error)
    raise AssertionError("it was taken")


# ------------------------------------------------------------ OSS
def oss_state_of_other_shapes(rank: int, optim: type[torch.optim.Optimizer], backend: str) -> list[str]:
    model = model_of()
    oss = shardkit.OSS(model.parameters(), optim=optim, lr=0.1, backend=backend)
    saved = torch.optim.Adam(model_of().parameters(), lr=0.5) if optim is torch.optim.Adam else None
    state: dict[str, Any]
    if saved is None:  # not known to be element-wise: only what there is can be compared
        model(torch.ones(1, 5)).sum().backward()
        oss.step()
        oss.consolidate_state_dict(-1)
        state = oss.state_dict()
    else:
        for p in saved.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        saved.step()
        state = saved.state_dict()
    before = copy.deepcopy([model.state_dict(), oss.param_groups[0]["lr"], dict(oss.optim.state)])
    said = []
    for wrong in range(4):  # whoever owns it
        other = copy.deepcopy(state)
        key = next(k for k, v in other["state"][wrong].items() if isinstance(v, torch.Tensor) and v.dim() > 0)
        other["state"][wrong][key] = torch.ones(7)
        said.append(refusal(oss.load_state_dict, other))
        assert f"{key!r} of parameter {wrong} (shape" in said[-1]
        assert "has shape (7,)" in said[-1]
    now = [model.state_dict(), oss.param_groups[0]["lr"], dict(oss.optim.state)]
    assert str(now) == str(before)
    oss.load_state_dict(state)
    return said


class Averaging(torch.optim.Adam):
    """An optimizer that nobody knows."""


@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "simulated"), (3, "simulated")])
def test_oss_refuses_state_of_other_shapes_on_all_ranks(world_size: int, backend: str) -> None:
    said = rank_pool(world_size, backend).run(oss_state_of_other_shapes, torch.optim.Adam, backend)
    assert said == [said[0]] * world_size
    assert len(said[0]) == 4


def test_oss_compares_the_state_of_unknown_optimizers_with_what_there_is() -> None:
    """The owner sees it, and all ranks refuse."""
    said = rank_pool(2).run(oss_state_of_other_shapes, Averaging, "gloo")
    assert [len(s) for s in said] == [4, 4]


def test_adascale_refuses_averages_of_another_size() -> None:
    ada = shardkit.AdaScale(
        torch.optim.SGD(model_of().parameters(), lr=0.1), world_size=1, num_gradients_to_accumulate=2
    )
    state = ada.state_dict()
    name = next(k for k in state["state"]["adascale"] if k.endswith("var_avg"))
    state["state"]["adascale"][name] = torch.ones(3)
    state["param_groups"][0]["lr"] = 9.0
    with pytest.raises(ConfigurationError, match="3 values"):
        ada.load_state_dict(state)
    assert ada.param_groups[0]["lr"] == 0.1


# ------------------------------------------------------------ FSDP
def fsdp(width: int = 3, **options: Any) -> Any:
    return through("FSDP", model_of(width), "0", **options)


def full_state_of_other_shapes(rank: int, flatten: bool) -> list[str]:
    model = fsdp(flatten=flatten)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    box = [model.gather_full_optim_state_dict(optimizer)]
    dist.broadcast_object_list(box)
    state: Any = box[0]
    said = []
    for change in (
        lambda s: s.update(exp_avg=torch.ones(8)),
        lambda s: s.update(
            exp_avg=s["exp_avg"].t().contiguous() if s["exp_avg"].dim() > 1 else torch.ones(99)
        ),
        lambda s: s.pop("exp_avg_sq"),
    ):
        other = copy.deepcopy(state)
        change(other["state"][2])
        if flatten or "exp_avg_sq" in other["state"][2]:
            said.append(refusal(model.get_shard_from_optim_state_dict, other))
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(state))
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp_refuses_optimizer_state_of_other_shapes(world_size: int) -> None:
    for flatten in (True, False):
        said = rank_pool(world_size).run(full_state_of_other_shapes, flatten)
        assert said == [said[0]] * world_size
        assert "'exp_avg' of '0.weight' has shape (8,), expected (3, 5)" in said[0][0], said[0]
    assert len(said[0]) >= 2


def shards_of_other_ranks(rank: int, world_size: int, folder: str) -> list[str]:
    model, said = fsdp(), []
    path = Path(folder) / f"{rank}.pt"
    shardkit.save({"model": model.local_state_dict(), "meta": model.local_metadata_dict()}, path)
    shardkit.save({"model": fsdp(width=4).local_state_dict()}, Path(folder) / f"wide-{rank}.pt")
    dist.barrier()
    before = copy.deepcopy(model.local_state_dict())
    neighbour = (rank + 1) % world_size
    mine = shardkit.load(path)["model"]
    others = {
        "neighbour": shardkit.load(Path(folder) / f"{neighbour}.pt")["model"],
        "neighbour on rank 0": shardkit.load(Path(folder) / f"{neighbour if rank == 0 else rank}.pt")[
            "model"
        ],
        "wide": shardkit.load(Path(folder) / f"wide-{rank}.pt")["model"],
        "plain": dict(shardkit.load(Path(folder) / f"wide-{rank}.pt")["model"]),
        "world size": copy.deepcopy(mine),
    }
    others["world size"]._metadata[""]["shardkit_shard"]["world_size"] = 7
    for other in others.values():
        said.append(refusal(model.load_local_state_dict, other))
    now = model.local_state_dict()
    assert all(torch.equal(now[k], before[k]) for k in before)
    for good in (mine, dict(mine), torch.load(path, weights_only=True)["model"], OrderedDict(mine)):
        model.load_local_state_dict(good)
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_of_other_ranks_and_models_are_refused_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    said = rank_pool(world_size).run(shards_of_other_ranks, world_size, str(tmp_path))
    assert said == [said[0]] * world_size
    neighbour, first, wide, plain, size = said[0]
    assert "rank 0: the state dict is of rank 1; rank 1: the state dict is of rank" in neighbour
    assert "rank 0: the state dict is of rank 1. Nothing was loaded on any rank" in first
    assert (
        "holds [['2.weight', [2, 4]], ['2.bias', [2]]] in the state dict, expected [['2.weight', [2, 3]]"
        in wide
    )
    assert "flat_param_0' has shape" in plain
    assert "the state dict is of world size 7, this is" in size

    loaded = [shardkit.load(tmp_path / f"{r}.pt") for r in range(world_size)]
    weights, meta = [x["model"] for x in loaded], [x["meta"] for x in loaded]
    full = shardkit.FSDP.consolidate_shard_weights(weights, meta)
    assert all(torch.equal(full[k], v) for k, v in model_of().state_dict().items())
    wrong = shardkit.load(tmp_path / "wide-1.pt")["model"]
    with pytest.raises(ConfigurationError, match=r"state dict 0 of .* is rank 1's"):
        shardkit.FSDP.consolidate_shard_weights([weights[1], *weights[1:]], meta)
    other = copy.deepcopy(meta[1])
    other["param_metadata"][0]["params"]["flat_param_0"]["shapes"][0] = torch.Size([9, 9])
    with pytest.raises(ConfigurationError, match=r"shards of different models.*on rank 1"):
        shardkit.FSDP.consolidate_shard_weights(weights, [meta[0], other, *meta[2:]])
    half = {k: v.half() for k, v in wrong.items()}
    with pytest.raises(ConfigurationError, match=r"is torch\.float32 on rank 0, torch\.float16 on rank 1"):
        shardkit.FSDP.consolidate_shard_weights([weights[0], half, *weights[2:]], meta)
