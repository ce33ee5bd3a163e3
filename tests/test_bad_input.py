"""Bad input: a clear error on every rank, within seconds, that says what to change."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import shardkit
from shardkit.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
from shardkit.optim.oss import OSS
from shardkit.utils.testing import DummyProcessGroup
from shardkit.wrapping.activations import checkpoint_wrapper
from tests.beside import batch
from tests.doors import DOORS
from tests.pools import on_ranks


@on_ranks(2)
def test_wrong_optimizer_class(rank: int) -> None:
    model = nn.Linear(3, 2)
    for optim, message in (
        (torch.optim.SGD(model.parameters(), lr=0.1), "pass its class"),
        (nn.Linear, "no torch.optim.Optimizer"),
        ("adam", "no optimizer class"),
        (OSS, "OSS itself"),
        (lambda groups, **_: None, "has to return a torch.optim.Optimizer"),
    ):
        with pytest.raises(shardkit.ConfigurationError, match=message):
            OSS(model.parameters(), optim=optim, lr=0.1)
    with pytest.raises(shardkit.ConfigurationError, match="wrap it first: OSS"):
        ShardedDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(shardkit.ConfigurationError, match="a Sequential, a module"):
        shardkit.ShardedDDP(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(shardkit.ConfigurationError, match="partition is 'best'"):
        shardkit.OSS(model.parameters(), partition="best", lr=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["x", None, 3, nn.Linear, [torch.ones(1)]], ids=str)
@on_ranks(2)
def test_what_is_no_module_at_every_door(rank: int, wrong: Any) -> None:
    owner = shardkit.OSS(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    doors: list[Any] = [*DOORS.values(), FullyShardedDataParallel, checkpoint_wrapper, shardkit.AdaScale]
    doors.append(lambda module: shardkit.ShardedDDP(module, owner))
    if not isinstance(wrong, list):
        doors.append(lambda params: shardkit.OSS(params, torch.optim.SGD, lr=0.1))
    for door in doors:
        with pytest.raises(shardkit.ConfigurationError, match=r"takes .*, and got a"):
            door(wrong)


@on_ranks(2)
def test_options_of_another_kind_at_every_door(rank: int) -> None:
    """Found: AttributeErrors, and an offload_policy of any kind that torch's words took in silence."""
    model, dtensors = nn.Linear(2, 2), DOORS["dtensors"]
    oss = functools.partial(shardkit.OSS, [*model.parameters()], torch.optim.SGD, lr=0.1)
    policies = "precision reshard offload reduce backend"
    doors: list[tuple[Any, str]] = [(functools.partial(d, model), policies) for d in (*DOORS.values(),)[:4]]
    doors += [
        (functools.partial(dtensors, model), "mp_policy offload_policy ignored_params reshard_after_forward"),
        (lambda **other: shardkit.ShardedDDP(model, oss(), **other), "reduce backend"),
        (lambda **other: oss(**other), "broadcast_dtype backend"),
        (shardkit.ReducePolicy, "dtype compression bucket_numel predivide microbatches"),
        (shardkit.PrecisionPolicy, "compute buffers inputs compression"),
        (shardkit.ReshardPolicy, "after_forward prefetch"),
    ]
    for door, names in doors:
        for name in names.split():
            with pytest.raises(shardkit.ConfigurationError, match=rf"{name} is .*; it takes "):
                door(**{name: object()})
    with pytest.raises(shardkit.ConfigurationError, match="both dtensors=True and align were passed"):
        dtensors(model, align=2)
    whole = shardkit.ReshardPolicy(prefetch=np.int64(2), after_forward=np.uint8(2))  # type: ignore[arg-type]
    assert whole == shardkit.ReshardPolicy(prefetch=2, after_forward=2)
    assert type(whole.prefetch) is type(whole.after_forward) is int
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    some = torch.optim.SGD(model[1].parameters(), lr=0.1).state_dict()
    with pytest.raises(shardkit.ConfigurationError, match="if its optimizer had trainable parameters alone"):
        shardkit.sharding_of(shardkit.fully_shard(model)).get_shard_from_optim_state_dict(some)


@on_ranks(2)
def test_parameters_on_several_devices(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(shardkit.ConfigurationError, match="several devices: cpu, meta"):
        OSS(model.parameters(), lr=0.1)
    optimizer = OSS(model[0].parameters(), lr=0.1)
    with pytest.raises(shardkit.ConfigurationError, match="several devices: cpu, meta"):
        ShardedDataParallel(model, optimizer)


@on_ranks(2, 3)
def test_parameters_that_differ_between_ranks(rank: int, world_size: int) -> None:
    first, other = nn.Linear(3, 2), nn.Linear(2, 3)
    cases: list[tuple[Any, str]] = [
        ([nn.Parameter(torch.zeros(3 if rank == 1 else 4))], r"rank 1 has parameter 0 of group 0 \(\[3\]"),
        (
            [nn.Parameter(torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32))],
            "torch.float64",
        ),
        ([first.weight, other.weight] if rank == 1 else [other.weight, first.weight], r"position 1"),
        ([nn.Parameter(torch.zeros(2)) for _ in range(1 + (rank == 1))], "rank 1 has parameter 1"),
        (
            [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(1 + (rank == 1))],
            "number of param groups",
        ),
    ]
    for params, message in cases:
        with pytest.raises(shardkit.RankMismatchError, match=message):
            OSS(params, lr=0.1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2 + (rank == 1)))
    optimizer = OSS(model[0].parameters(), lr=0.1)
    with pytest.raises(shardkit.RankMismatchError, match=r"rank 1 has 1\.weight"):
        ShardedDataParallel(model, optimizer)


@on_ranks(2)
def test_process_groups_that_do_not_fit(rank: int) -> None:
    model = nn.Linear(3, 2)
    only_0 = dist.new_group([0])
    if rank == 0:
        OSS(model.parameters(), lr=0.1, group=only_0)
    else:
        with pytest.raises(shardkit.ConfigurationError, match="rank 1 is no member"):
            OSS(model.parameters(), lr=0.1, group=only_0)
        with pytest.raises(shardkit.ConfigurationError, match="rank 1 is no member"):
            shardkit.ShardedDDP(
                model, OSS(model.parameters(), lr=0.1, group=DummyProcessGroup(0, 1)), group=only_0
            )
    with pytest.raises(shardkit.ConfigurationError, match="can't communicate"):
        OSS(model.parameters(), lr=0.1, group=DummyProcessGroup(rank, 2))
    with pytest.raises(shardkit.ConfigurationError, match="process_group is a str"):
        OSS(model.parameters(), lr=0.1, group="everybody")


@on_ranks(2)
def test_gradients_that_require_gradients(rank: int) -> None:
    """fairscale's refuses it in the first forward, too."""
    model = nn.Linear(6, 2)
    wrapped = ShardedDataParallel(model, OSS(model.parameters(), lr=0.1))
    model.weight.grad = torch.zeros_like(model.weight, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"rank {rank}: the gradient of weight requires a gradient itself"):
        wrapped(batch(0, rank))
    model.weight.grad = None
    wrapped(batch(0, rank)).sum().backward()


@on_ranks(2)
def test_a_module_that_moves_to_another_kind_of_device_after_wrapping(rank: int) -> None:
    """Its gradients would travel over the host's connections: slowly, and nobody would know why."""
    net = nn.Linear(6, 2)
    optimizer = OSS(net.parameters(), lr=0.1)
    with pytest.raises(shardkit.ConfigurationError, match="none of the module's parameters"):
        shardkit.ShardedDDP(nn.Linear(6, 2), optimizer)
    model = shardkit.ShardedDDP(net, optimizer)
    with pytest.raises(
        shardkit.ConfigurationError, match=r"weight was moved to meta after .* wrapped on cpu"
    ):
        model.to("meta")


def test_no_process_group() -> None:
    with pytest.raises(shardkit.ConfigurationError, match="init_process_group"):
        OSS(nn.Linear(3, 2).parameters(), lr=0.1)


def test_one_rank_without_a_process_group() -> None:
    """As fairscale's guide does it: a dummy group of size 1 trains in one process."""
    model = nn.Linear(6, 2)
    optimizer = OSS(model.parameters(), lr=0.1, group=DummyProcessGroup(rank=0, size=1))
    wrapped = ShardedDataParallel(model, optimizer, process_group=DummyProcessGroup(rank=0, size=1))
    before = model.weight.detach().clone()
    wrapped(batch(0, 0)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def _dies_in_backward(rank: int) -> str:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = OSS(model.parameters(), lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
    if rank == 1:
        model[1].weight.register_hook(lambda _: os._exit(3))
    try:
        wrapped(torch.ones(2, 64)).sum().backward()
    except shardkit.RankLostError as error:
        return str(error)
    return "nothing was raised"


def _survivor(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    message = _dies_in_backward(rank)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(message)


def test_a_rank_that_dies_during_backward(tmp_path: Any) -> None:
    # not through launch, which would end the survivors before they can say anything
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    ranks = [context.Process(target=_survivor, args=(rank, 3, str(tmp_path))) for rank in range(3)]
    for process in ranks:
        process.start()
    ranks[1].join(60)
    died = time.monotonic()
    for process in ranks:
        process.join(100)
    assert time.monotonic() - died < 60
    assert ranks[1].exitcode == 3
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert f"rank {rank} lost another rank" in text
        assert "gradients of bucket" in text


def _explode(_: torch.Tensor) -> None:
    raise ZeroDivisionError("on purpose")


@on_ranks(2)
def test_an_exception_in_backward_is_not_stepped_on(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = OSS(model.parameters(), lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
    handle = model[0].weight.register_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        wrapped(batch(rank, 0)).sum().backward()
    handle.remove()
    with pytest.raises(shardkit.LifecycleError, match="did not finish"):
        optimizer.step()
    wrapped.zero_grad()
    wrapped(batch(rank, 0)).sum().backward()
    optimizer.step()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, model[0].weight.tolist())
    assert gathered[0] == gathered[1]
