"""Options that differ between ranks: both are told which, and both values, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import RankMismatchError, ShardkitError
from shardkit.policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from tests.pools import on_ranks, rank_pool, run_once

# name -> options of rank 0 and of rank 1, the option's name and both values in the message
FSDP_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "flatten": ({}, {"flatten": False}, ("flatten", "True", "False")),
    "compute": (
        {"precision": PrecisionPolicy(torch.bfloat16)}, {}, ("precision.compute", "torch.bfloat16", "None"),
    ),
    "buffers": (
        {"precision": PrecisionPolicy(buffers=torch.float16)}, {},
        ("precision.buffers", "torch.float16", "None"),
    ),
    "reduce dtype": (
        {"reduce": ReducePolicy(dtype=torch.float16)}, {}, ("reduce.dtype", "torch.float16", "None"),
    ),
    "predivide": ({"reduce": ReducePolicy(predivide=2.0)}, {}, ("reduce.predivide", "2.0", "None")),
    "after_forward": (
        {"reshard": ReshardPolicy(after_forward=False)}, {}, ("reshard.after_forward", "False", "True"),
    ),
    "prefetch": ({"reshard": ReshardPolicy(prefetch=0)}, {}, ("reshard.prefetch", "0", "1")),
    "offload": ({"offload": OffloadPolicy(parameters=True)}, {}, ("offload.parameters", "True", "False")),
    "start values": ({"sync_module_states": False}, {}, ("sync_module_states", "False", "True")),
}  # fmt: skip

OSS_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "class": ({"optim": torch.optim.Adam}, {"optim": torch.optim.SGD}, ("optim", "Adam", "SGD")),
    "rate": ({"lr": 0.1}, {"lr": 0.2}, ("lr of group 0", "0.1", "0.2")),
    "betas": (
        {"optim": torch.optim.Adam, "betas": (0.9, 0.99)}, {"optim": torch.optim.Adam, "betas": (0.8, 0.99)},
        ("betas of group 0", "(0.9, 0.99)", "(0.8, 0.99)"),
    ),
    "partition": ({"partition": "balanced"}, {}, ("partition", "balanced", "greedy")),
    "wire": ({"broadcast_dtype": torch.float16}, {}, ("broadcast_dtype", "torch.float16", "None")),
}  # fmt: skip

DDP_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "bucket": ({"reduce": ReducePolicy(bucket_numel=4)}, {}, ("reduce.bucket_numel", "4", "None")),
    "buffers": ({"broadcast_buffers": False}, {}, ("broadcast_buffers", "False", "True")),
}


def _refused(build: Callable[[], Any]) -> tuple[str, str]:
    try:
        build()
    except ShardkitError as error:
        return type(error).__name__, str(error)
    return "", ""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _fsdp(rank: int, options: list[dict[str, Any]]) -> tuple[str, str]:
    return _refused(lambda: shardkit.FSDP(_model(), **options[rank]))


def _oss(rank: int, options: list[dict[str, Any]]) -> tuple[str, str]:
    mine = {"lr": 0.1, **options[rank]}
    return _refused(lambda: shardkit.OSS(_model().parameters(), **mine))


def _ddp(rank: int, options: list[dict[str, Any]]) -> tuple[str, str]:
    model = _model()
    optimizer = shardkit.OSS(model.parameters(), lr=0.1)
    return _refused(lambda: shardkit.ShardedDDP(model, optimizer, **options[rank]))


def _check(outcomes: list[tuple[str, str]], words: tuple[str, str, str]) -> None:
    name, mine, theirs = words
    for kind, text in outcomes:
        assert kind == RankMismatchError.__name__, outcomes
        assert f"option {name} " in text
        assert "rank 0" in text
        assert mine in text
        assert theirs in text
        assert "same options" in text


ALL = [
    (program, values)
    for program, options in ((_fsdp, FSDP_OPTIONS), (_oss, OSS_OPTIONS), (_ddp, DDP_OPTIONS))
    for values in options.values()
]
NAMES = [
    f"{kind} {name}"
    for kind, options in (("FSDP", FSDP_OPTIONS), ("OSS", OSS_OPTIONS), ("ShardedDDP", DDP_OPTIONS))
    for name in options
]


@pytest.mark.parametrize("backend", ["gloo", "simulated"])
@pytest.mark.parametrize(("program", "values"), ALL, ids=NAMES)
def test_a_differing_option_is_named(program: Any, values: Any, backend: str) -> None:
    first, second, words = values
    _check(rank_pool(2, backend).run(program, [first, second]), words)


def _groups(rank: int) -> tuple[str, str]:
    model = _model()
    groups = [
        {"params": list(model[0].parameters()), "weight_decay": 0.0},  # type: ignore[index]
        {"params": list(model[1].parameters()), "weight_decay": 0.1 * (1 + rank)},  # type: ignore[index]
    ]
    return _refused(lambda: shardkit.OSS(groups, torch.optim.AdamW, lr=0.1))


def test_an_option_of_the_second_group() -> None:
    _check(rank_pool(2).run(_groups), ("weight_decay of group 1", "0.1", "0.2"))


def _schedule(rank: int) -> float:
    model = _model()
    optimizer = shardkit.OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer.refresh_trainable()
    return float(optimizer.param_groups[0]["lr"])


def test_rates_are_the_users_later_on() -> None:
    assert rank_pool(2).run(_schedule) == [0.1, 0.2]


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(2, 3)
def test_optimizers_over_shards(rank: int, flatten: bool) -> None:
    """Before their first step."""
    found = []
    for classes, rates in (
        ((torch.optim.SGD, torch.optim.Adam), (0.1, 0.1)),
        ((torch.optim.SGD,) * 2, (0.1, 0.2)),
    ):
        model = shardkit.FSDP(_model(), flatten=flatten)
        optimizer = classes[rank > 0](model.parameters(), lr=rates[rank > 0])
        model(torch.ones(2, 3)).sum().backward()
        found.append(_refused(optimizer.step))
    kinds, rates = found
    _check([kinds], ("optimizer", "SGD", "Adam"))
    _check([rates], ("lr of group 0", "0.1", "0.2"))


def _another_rate(rank: int, strategy: str, when: int) -> str:
    """How a training ends whose learning rate rank 1 alone changes before a step."""
    model: nn.Module = _model()
    if strategy == "oss":
        optimizer: Any = shardkit.OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
        model = shardkit.ShardedDDP(model, optimizer)
    else:
        is_cut = strategy == "dtensors"
        model = shardkit.FSDP(model) if strategy == "fsdp" else shardkit.fully_shard(model, dtensors=is_cut)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        if step == when and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.7

        def train() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        end = _refused(train)[1]
        if end:
            return end
        optimizer.zero_grad()
        if step == 0:
            schedule.step()
    return ""


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("strategy", ["oss", "fsdp", "fully_shard"])
def test_a_learning_rate_that_one_rank_changes(strategy: str, when: int) -> None:
    """All ranks hear of it, those that have changed nothing too; a schedule is every rank's."""
    for end in rank_pool(3, "simulated").run(_another_rate, strategy, when):
        assert "lr of group 0 0.7" in end.replace("= ", "")


@pytest.mark.parametrize("strategy", ["oss", "dtensors"])
def test_a_learning_rate_that_one_process_changes(strategy: str) -> None:
    for end in run_once(2, "gloo", _another_rate, strategy, 2):
        assert "a step with other options than before: lr of group 0 0.7" in end
