"""What a step would cost on a device with streams: how often the host waits, and how far collectives run ahead."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import (
    FSDP,
    OSS,
    OffloadPolicy,
    PrecisionPolicy,
    ReducePolicy,
    ReshardPolicy,
    ShardedDDP,
    fully_shard,
    sharding_of,
)  # fmt: skip
from shardkit.backend import get_backend
from tests.backends.streams_device import StreamsBackend, current_device
from tests.figures.counters import PACKAGE

UNITS, WIDTH = 5, 96  # not so small as to travel together
STEPS = 3
Parts = tuple[Any, Any, Any, Any]  # what is called, its no_sync, the optimizer, and what clips
READS = {"tolist", "numpy", "cpu", "item"}  # the others are operations of torch's, which the device counts


class Block(nn.Module):
    """Two layers, of which the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return x if self.skips else torch.tanh(self.second(x))


@contextmanager
def host_reads(found: Counter[str]) -> Iterator[None]:
    """Counts where shardkit reads values of tensors."""

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in READS and isinstance(called.__self__, torch.Tensor):
            found[f"{frame.f_code.co_qualname} {called.__name__}"] += frame.f_code.co_filename.startswith(
                PACKAGE
            )

    device = current_device()
    assert device is not None
    before = Counter(device.host_waits)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        found.update(device.host_waits - before)
        for name in [name for name, count in found.items() if not count]:
            del found[name]


def _train(
    rank: int,
    build: Callable[[nn.Module], Parts],
    skips: Callable[[int], bool],
    accumulate: bool,
) -> Counter[str]:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(UNITS)]
    blocks[1].skips = skips(rank)
    net, no_sync, optimizer, clip = build(nn.Sequential(*blocks))
    found: Counter[str] = Counter()
    for step in range(STEPS + 1):
        with host_reads(found) if step else nullcontext():  # the first one makes buffers and plans
            if accumulate:
                with no_sync():
                    net(torch.randn(3, WIDTH)).square().mean().backward()
            net(torch.randn(3, WIDTH)).square().mean().backward()
            clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def fsdp(net: nn.Module, **options: Any) -> Parts:
    model = FSDP(nn.Sequential(*(FSDP(block, **options) for block in net)), **options)  # type: ignore[arg-type]
    return model, model.no_sync, torch.optim.SGD(model.parameters(), lr=0.1), model.clip_grad_norm_


def kept(net: nn.Module) -> Parts:
    return fsdp(net, reshard=ReshardPolicy(after_forward=False))


def in_place(net: nn.Module, **options: Any) -> Parts:
    for block in net:  # type: ignore[attr-defined]
        fully_shard(block, **options)
    sharding = sharding_of(fully_shard(net, **options))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, sharding.no_sync, optimizer, sharding.clip_grad_norm_


def sharded_ddp(net: nn.Module) -> Parts:
    optimizer = OSS(net.parameters(), torch.optim.SGD, lr=0.1)
    model = ShardedDDP(net, optimizer, reduce=ReducePolicy(bucket_numel=2 * (WIDTH + 1) * WIDTH + 56))
    return model, model.no_sync, optimizer, optimizer.clip_grad_norm


def _nobody(rank: int) -> bool:
    return False


def _first(rank: int) -> bool:
    return rank == 0


def _reads(
    build: Any, skips: Callable[[int], bool] = _nobody, accumulate: bool = False
) -> list[Counter[str]]:
    return shardkit.launch(_train, 2, backend="streams", args=(build, skips, accumulate), timeout=30)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("build", [fsdp, kept, sharded_ddp, in_place])
def test_the_host_never_waits(build: Any, accumulate: bool) -> None:
    """Clipping by the global norm included."""
    assert _reads(build, accumulate=accumulate) == [{}, {}]


@pytest.mark.parametrize(("build", "most"), [(fsdp, 1), (sharded_ddp, 2)])
def test_the_host_waits_where_a_gradient_is_missing(build: Any, most: int) -> None:
    """The rank without it asks once a unit or bucket what the others had; the others ask nothing."""
    without, others = _reads(build, _first)
    assert 1 <= sum(without.values()) <= most * STEPS, without
    assert not others


def partly_frozen(net: nn.Module) -> Parts:
    net[2].requires_grad_(False)  # type: ignore[index]
    return fsdp(net)


def test_the_host_waits_once_where_frozen_units_lie_behind_trainable_ones() -> None:
    """For what ranks tell each other of whether backward goes through them: a byte a unit."""
    for found in _reads(partly_frozen):
        assert sum(found.values()) == STEPS, found


def _uneven(rank: int, build: Callable[[nn.Module], Parts]) -> Counter[str]:
    torch.manual_seed(0)
    net, _, optimizer, _ = build(nn.Sequential(*[Block() for _ in range(UNITS)]))
    device = current_device()
    assert device is not None
    before: Counter[str] = Counter()
    for step in range(STEPS + 1):
        with shardkit.uneven(net):
            for _ in range(1 + (rank + step) % 2):
                net(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            before = Counter(device.host_waits)
    return device.host_waits - before


@pytest.mark.parametrize("build", [fsdp, sharded_ddp, in_place])
def test_the_host_waits_for_no_device_where_ranks_have_unequal_work(build: Any) -> None:
    """What ranks tell each other is on the host."""
    assert shardkit.launch(_uneven, 2, backend="streams", args=(build,), timeout=30) == [{}, {}]


def _offloaded(rank: int, early: bool, compute: Any, backwards: int) -> list[tuple[Counter[str], list[int]]]:
    device = current_device()
    assert device is not None
    torch.manual_seed(0)
    model, _, optimizer, _ = fsdp(
        nn.Sequential(*[Block() for _ in range(UNITS)]),
        offload=OffloadPolicy(masters=True),
        precision=PrecisionPolicy(compute=compute),
    )
    found = []
    for _ in range(STEPS + 1):
        copied, waits, issued = Counter(device.copied), Counter(device.host_waits), len(device.waited_after)
        for k in range(backwards):
            is_step = early and k == backwards - 1
            with shardkit.step_in_backward(optimizer) if is_step else nullcontext():
                model(torch.randn(3, WIDTH)).float().square().mean().backward()
        if not early:
            optimizer.step()
            optimizer.zero_grad()
        assert not found or set(device.host_waits - waits) == {"copy"}
        found.append((device.copied - copied, device.waited_after[issued:]))
    return found[1:]  # the first one makes buffers and plans


@pytest.mark.parametrize("early", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_masters_cross_the_bus_once_each_way(early: bool, compute: Any, backwards: int) -> None:
    """At most 2 P a step of a rank's P: weights up once a step, gradients down once a backward.

    The host waits for the last unit's gradients, when all of backward is issued, and for nothing else.
    """
    part = UNITS * 2 * (WIDTH + 1) * WIDTH * (4 if compute is None else 2) / 3
    for found in shardkit.launch(
        _offloaded, 3, backend="streams", args=(early, compute, backwards), timeout=30
    ):
        for copied, waited_after in found:
            assert copied["up"] <= 1.01 * part
            assert copied["down"] <= 1.01 * backwards * part
            assert len(waited_after) == len(set(waited_after)) == backwards


class Odd(nn.Module):
    """A scalar before everything else, and by default sizes that are no multiple of anything."""

    def __init__(self, a: int = 5, b: int = 7, c: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.Sequential(nn.Linear(a, b), nn.Linear(b, c), nn.Linear(c, a))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) * self.scale
        return y


def _train_odd(rank: int, wrapper: str, dtype: torch.dtype) -> dict[str, int]:
    torch.manual_seed(0)
    sizes = (16, 32, 8) if wrapper == "fully_shard" else (5, 7, 3)
    net: nn.Module = Odd(*sizes).to(dtype)
    if wrapper == "fully_shard":
        model: nn.Module = fully_shard(net)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif wrapper != "sharded ddp":
        model = FSDP(net, align=16 // dtype.itemsize if wrapper == "aligned fsdp" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDDP(net, optimizer)
        places = [p.storage_offset() * p.element_size() for p in net.parameters()]
        assert [at % 16 for at in places] == [0] * len(places)
    model(torch.randn(2, sizes[0], dtype=dtype)).square().mean().backward()
    if wrapper == "sharded ddp":
        assert not [
            p for p in net.parameters() if p.grad is not None and p.grad.storage_offset() * p.itemsize % 16
        ]
    optimizer.step()
    device = current_device()
    assert device is not None
    return dict(device.misaligned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wrapper", ["fsdp", "aligned fsdp", "fully_shard", "sharded ddp"])
def test_parts_of_buffers_are_aligned(wrapper: str, dtype: torch.dtype) -> None:
    """All but what FSDP gathers: fairscale's shards are of any size, and lie end to end, unless one asks for more.

    ``fully_shard`` cuts between rows: where these are multiples of 16 bytes, so are shards.
    """
    for found in shardkit.launch(_train_odd, 3, backend="streams", args=(wrapper, dtype), timeout=30):
        found.pop("all_gather_into (main/parameters)" if wrapper == "fsdp" else "", None)
        assert not found


def _step(rank: int, build: Callable[[nn.Module], Parts]) -> tuple[int, Counter[str]]:
    """Returns the most bytes in flight of a forward, and collectives of the step."""
    device, net = current_device(), build(nn.Sequential(*[Block() for _ in range(UNITS)]))[0]
    assert device is not None
    for _ in range(2):  # the first one learns the order
        device.most_in_flight, issued = 0, len(device.issued)
        loss = net(torch.randn(3, WIDTH)).sum()
        most = device.most_in_flight
        loss.backward()
    return most, Counter(call[1] for call in device.issued[issued:])


@pytest.mark.parametrize("wrap", [fsdp, in_place])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_collectives_run_ahead_by_as_many_units_as_are_prefetched(prefetch: int, wrap: Any) -> None:
    """However far the host is ahead of the device: memory is taken as the host issues, so this bounds it."""

    def build(net: nn.Module) -> Parts:
        parts: Parts = wrap(net, reshard=ReshardPolicy(prefetch=prefetch))
        return parts

    _reads(build)
    backend = get_backend("streams")
    assert isinstance(backend, StreamsBackend)
    size = 4 * 2 * (WIDTH + 1) * WIDTH
    reduction = 1.5 * 1.03  # packed gradients with flags, and the shard of their sum
    for device in backend.devices:
        assert device.most_in_flight <= (1 + prefetch + reduction) * size
    # the last unit stays gathered; of two ahead the first ones come as one message
    collectives = {"all_gather_into": 2 * UNITS - 1 - (prefetch > 1), "reduce_scatter_into": UNITS}
    found = shardkit.launch(_step, 2, backend="streams", args=(build,), timeout=30)
    assert found == [((1 + prefetch) * size, collectives)] * 2
