"""The simulated device with streams: it finds what CUDA and NCCL would let pass, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import FSDP, OSS, ReducePolicy, ShardedDDP
from shardkit.backend import DONE, get_backend
from shardkit.errors import OutOfStepError, RankFailedError
from shardkit.fsdp.flat_param import Stored
from shardkit.fsdp.unit import GradientPack, StoredPack
from shardkit.oss.exchange import Reducer
from shardkit.oss.placement import FlatParameters
from tests.backends.streams_device import (
    RaceError,
    SimulatedDevice,
    StreamsBackend,
    StreamsGroup,
    current_device,
)

WORLD_SIZE = 3


def launch(fn: Callable[..., Any], *args: Any, backend: str = "streams") -> list[Any]:
    return shardkit.launch(fn, WORLD_SIZE, backend=backend, args=args, timeout=30)


def here() -> tuple[StreamsGroup, SimulatedDevice]:
    device = current_device()
    group = get_backend("streams").group()
    assert isinstance(group, StreamsGroup)
    assert device is not None
    return group, device


# ------------------------------------------------------------------ single accesses
def _before_the_wait(rank: int, access: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    group, _ = here()
    shard, output = torch.full([2], float(rank)), torch.empty(2 * WORLD_SIZE)
    work = group.all_gather_into(output, shard, async_op=True, label="some")
    access(output, shard)
    work.wait()
    assert output.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "access",
    [
        lambda output, shard: output.sum(),
        lambda output, shard: output[1:].view(5)[-1].add_(1),
        lambda output, shard: shard.zero_(),
        lambda output, shard: torch.empty(6).copy_(output),
        lambda output, shard: torch.mul(shard, 2, out=shard),
        lambda output, shard: torch._foreach_add_([shard], 1.0),
        lambda output, shard: get_backend("streams").release_storage(output),
        lambda output, shard: get_backend("streams").release_storage(shard),
        lambda output, shard: get_backend("streams").group().channel("b").broadcast(output, 0, async_op=True),
    ],
    ids=["read", "write in a view", "write what is read", "copy", "out", "foreach", "release", "release read", "other"],
)  # fmt: skip
def test_what_nothing_orders_is_a_race(access: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RankFailedError, match=r"RaceError.*all_gather_into 'some'") as caught:
        launch(_before_the_wait, access)
    assert "test_streams.py" in str(caught.value).split("It was issued at")[1].split(";")[0]


@pytest.mark.parametrize(
    "access",
    [
        lambda output, shard: shard.sum(),
        lambda output, shard: output.view(2, 3).shape,
        lambda output, shard: torch.empty_like(output),
        lambda output, shard: output.detach()[:2],
    ],
    ids=["read what is read", "view", "like", "slice"],
)
def test_what_does_not_meet_is_none(access: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    launch(_before_the_wait, access)


def _parts(rank: int) -> None:
    """Bytes count, not storages; and a later work of the same communicator orders the earlier ones."""
    group, device = here()
    memory = torch.zeros(8)
    first = group.all_reduce(memory[:4], async_op=True)
    memory[4:].fill_(1.0)
    other = torch.zeros(1)
    group.all_reduce(other, async_op=True).wait()
    assert memory[:4].sum() == 0
    assert device.unwaited() == []
    first.wait()
    gone = torch.ones(4)
    get_backend("streams").release_storage(gone)
    with pytest.raises(RaceError, match="sum touches memory that was given back"):
        gone.sum()


def test_parts_of_memory_and_order_within_a_communicator() -> None:
    launch(_parts)


def _values(rank: int) -> None:
    group, _ = here()
    taken = torch.ones(4)
    for memory in (torch.empty(4), taken.new_empty(4), torch.empty_like(taken)):
        assert memory.isnan().all()
    get_backend("streams").release_storage(taken)
    get_backend("streams").take_storage(taken)
    assert taken.isnan().all()
    shard, whole = torch.zeros(1), torch.ones(WORLD_SIZE)
    work = group.reduce_scatter_into(shard, whole, async_op=True)
    numbers = shard.numpy()  # no operation of torch's
    assert numbers != numbers
    work.wait()
    assert numbers == WORLD_SIZE


def test_values_that_are_not_there_yet() -> None:
    launch(_values)


def _orders(rank: int, same: bool) -> None:
    group, device = here()
    a, b = group.channel("a"), group.channel("b")
    for g in (a, b) if same or rank else (b, a):
        g.all_reduce(torch.zeros(1), async_op=True)
    assert [call[1] for call in device.issued] == ["all_reduce"] * 2


def test_one_order_of_all_communicators() -> None:
    launch(_orders, True)
    with pytest.raises(OutOfStepError, match="different orders: collective 0"):
        launch(_orders, False)


def _notes(rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    group, device = here()
    memory = torch.zeros(9)
    group.all_reduce(memory[1:5])
    group.all_reduce(memory[4:8])
    works = [group.all_reduce(torch.zeros(n), async_op=True) for n in (4, 8)]
    for work in works:
        work.wait()
    torch.zeros(1).item()
    group.barrier()
    return dict(device.misaligned), dict(device.host_waits), device.most_in_flight


def test_what_costs_time() -> None:
    assert (
        launch(_notes)
        == [({"all_reduce (main)": 1}, {"_local_scalar_dense": 1, "barrier": 1}, 48)] * WORLD_SIZE
    )


# ------------------------------------------------------------------ faults planted into the core
def _units(shared: bool = False, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(4)]
    if shared:
        blocks[2] = blocks[1]
    return nn.Sequential(*blocks)


def _losses(
    rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Any]
) -> list[float]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(3, 8)).square().mean()
        loss.backward()
        clip(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp(rank: int, width: int = 8) -> list[float]:
    model = FSDP(nn.Sequential(*(FSDP(block) for block in _units(width=width))))
    return _losses(rank, model, torch.optim.SGD(model.parameters(), lr=0.1), model.clip_grad_norm_)


wide = partial(fsdp, width=1000)  # units do not travel together


def sharded_ddp(rank: int) -> list[float]:
    model = _units()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDDP(model, optimizer, reduce=ReducePolicy(bucket_numel=150))
    return _losses(rank, wrapped, optimizer, optimizer.clip_grad_norm)


def plain(ranks: int, optimizer_class: type[torch.optim.Optimizer], lr: float) -> list[float]:
    """Losses of rank 0 in one process that computes for all."""
    model = _units()
    optimizer, losses = optimizer_class(model.parameters(), lr=lr), []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(3, 8)).square().mean()
            (loss / ranks).backward()
            losses += [loss.item()] if rank == 0 else []
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("train", "optimizer", "lr"), [(fsdp, torch.optim.SGD, 0.1), (sharded_ddp, torch.optim.SGD, 0.1)]
)
def test_training(
    train: Callable[[int], list[float]], optimizer: type[torch.optim.Optimizer], lr: float
) -> None:
    assert launch(train)[0] == pytest.approx(plain(WORLD_SIZE, optimizer, lr), rel=1e-5)
    backend = get_backend("streams")
    assert isinstance(backend, StreamsBackend)
    for device in backend.devices:
        assert device.unwaited() == []
        assert device.host_waits["_local_scalar_dense"] == 3  # the losses


def _gather_without_wait(self: Stored) -> None:
    if self.in_flight is not None:
        self.in_flight = DONE, self.in_flight[1]
    _finish(self)


def _released_in_flight(self: Stored, after: Any = ()) -> None:
    _start(self, after)
    self._group.backend.release_storage(self._full)
    self._group.backend.take_storage(self._full)


def _packed_memory_given_back(self: StoredPack, gradients: Any) -> Any:
    sent = _reduce(self, gradients)
    self._group.backend.release_storage(self._packed)
    return sent


def _reduction_without_wait(self: GradientPack) -> None:
    if self.in_flight is not None:
        self.in_flight = (*self.in_flight[:3], None)
    _receive(self)


def _slot_packed_again(self: Reducer, bucket: Any) -> None:
    before, self._in_flight = self._in_flight, None
    _send(self, bucket)
    if before is not None:
        self._receive(before)


def _bucket_without_wait(self: Reducer, flight: Any) -> None:
    class Never:
        def wait(self) -> None: ...

    _receive_bucket(self, flight._replace(work=Never()))


def _slot_given_back(self: Reducer, bucket: Any) -> None:
    _send(self, bucket)
    self._release_slot()


def _publish_without_wait(self: FlatParameters, wire_dtype: Any) -> None:
    _publish(self, wire_dtype)


_start, _finish, _reduce, _receive = Stored.start, Stored.finish, StoredPack.reduce, GradientPack.receive
_send, _receive_bucket, _publish = Reducer._send, Reducer._receive, FlatParameters.publish
FAULTS: list[tuple[type, str, Callable[..., Any], Callable[[int], list[float]]]] = [
    (Stored, "finish", _gather_without_wait, fsdp),
    (Stored, "start", _released_in_flight, fsdp),
    (StoredPack, "reduce", _packed_memory_given_back, wide),
    (StoredPack, "reduce", _packed_memory_given_back, fsdp),
    (GradientPack, "receive", _reduction_without_wait, wide),
    (GradientPack, "receive", _reduction_without_wait, fsdp),
    (Reducer, "_send", _slot_packed_again, sharded_ddp),
    (Reducer, "_send", _slot_given_back, sharded_ddp),
    (Reducer, "_receive", _bucket_without_wait, sharded_ddp),
    (FlatParameters, "publish", _publish_without_wait, sharded_ddp),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "name", "fault", "train"), FAULTS, ids=[f[2].__name__.strip("_") for f in FAULTS]
)
def test_faults_are_found(
    where: type,
    name: str,
    fault: Callable[..., Any],
    train: Callable[[int], list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(RankFailedError, match="RaceError"):
        launch(train)
