"""Masters on the host: the numbers of the same training without, to the bit; what changes shards; activations.

The ``streams`` device knows which copies are on their way, and raises where somebody reads or writes what they use.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import (
    FSDP,
    Compression,
    OffloadPolicy,
    PrecisionPolicy,
    ReducePolicy,
    ReshardPolicy,
    fully_shard,
)
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.training.grad_scaler import ShardedGradScaler
from tests.backends.environments import environments, family
from tests.backends.streams_device import current_device
from tests.doors import through
from tests.pools import rank_pool

MASTERS = OffloadPolicy(masters=True, states=True, gradients=True)
Numbers = list[torch.Tensor]


class Net(nn.Module):
    """Layers of odd sizes, of which one gets no gradient now and then, one frozen, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.head = nn.Linear(7, 3, bias=False)
        self.layers[1].requires_grad_(False)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = x + layer(x).detach() if k == 2 and self.skips else torch.tanh(layer(x))
        return self.head(x) + self.head(x.flip(-1))


def sharded(door: str, device: torch.device | None = None, **options: Any) -> nn.Module:
    net = Net() if device is None else Net().to(device)
    return through(door, net, *[f"layers.{k}" for k in range(4)], **options)  # type: ignore[no-any-return]


def net_of(model: nn.Module) -> Net:
    return next(m for m in model.modules() if isinstance(m, Net))


def loss_of(model: nn.Module, rank: int, step: int, device: Any = None) -> torch.Tensor:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
    return model(x).float().pow(2).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return getattr(tensor, "full_tensor", lambda: tensor)().detach().cpu().clone()  # type: ignore[no-any-return]


def numbers(model: nn.Module) -> Numbers:
    return [whole(p) for p in model.parameters()]


def train(
    rank: int, door: str, options: dict[str, Any], early: bool = False, device: Any = None, plain: Any = None
) -> Numbers:
    model = plain or sharded(door, device, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    half = options["precision"].compute is not None if "precision" in options else False
    optimizer = torch.optim.AdamW(trained, lr=0.02, fused=half and device is None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = []
    for step in range(6):
        net_of(model).skips = step == 2 or (step == 4 and rank == 0)
        if step == 3:  # accumulated
            loss_of(model, rank, 50, device).backward()
        loss = loss_of(model, rank, step, device)
        if early and step != 1:
            with shardkit.step_in_backward(optimizer):
                loss.backward()
            assert all(p.grad is None for p in trained)
        else:
            loss.backward()
            if step == 1:
                found.append(whole(torch.nn.utils.clip_grad_norm_(trained, 0.05)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 0)
        schedule.step()
        with torch.no_grad():
            found += [loss.detach().cpu(), loss_of(model, rank, 7, device).cpu()]
    return [*found, *numbers(model)]


def equal(one: list[Numbers], other: list[Numbers]) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), (a, b)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_training_on_the_device_to_the_bit(door: str, world_size: int, compute: Any) -> None:
    pool = rank_pool(world_size, "gloo" if door == "dtensors" else "simulated")
    reshard = ReshardPolicy() if compute is None else ReshardPolicy(prefetch=2, frozen="host")
    options = {"precision": PrecisionPolicy(compute=compute), "reshard": reshard}
    truth = pool.run(train, door, options)
    for early in (False, True):
        equal(pool.run(train, door, {**options, "offload": MASTERS}, early), truth)


def _through_late(rank: int, name: str, early: bool, compute: Any) -> Numbers:
    device = get_backend(name).device()
    options = {"precision": PrecisionPolicy(compute=compute), "offload": MASTERS}
    return train(rank, "FSDP" if compute is None else "fully_shard", options, early, device)


@pytest.mark.parametrize(("backend", "world_size"), environments("late", "tpu"))
@pytest.mark.parametrize("early", [False, True], ids=["step", "in backward"])
def test_a_device_whose_copies_come_late_has_the_numbers_of_the_cpu(
    backend: str, world_size: int, early: bool
) -> None:
    for compute in (None, torch.bfloat16):
        found = rank_pool(world_size, backend).run(_through_late, family(backend), early, compute)
        truth = rank_pool(world_size, "gloo").run(_through_late, "gloo", early, compute)
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------ changes of the shards
def _changed(rank: int, world_size: int, door: str, folder: str) -> None:
    masters, plain = (
        sharded(door, offload=policy, precision=PrecisionPolicy(compute=torch.bfloat16))
        for policy in (MASTERS, None)
    )

    def alike(what: str) -> None:
        one, other = (loss_of(m, rank, 9) for m in (masters, plain))
        assert torch.equal(one, other), what
        assert all(map(torch.equal, numbers(masters), numbers(plain))), what

    alike("as made")
    both = [*masters.parameters(), *plain.parameters()]
    for p in both:
        with torch.no_grad():
            p.mul_(1.5)
    alike("changed in place")
    for p in both:
        p.data.copy_(p.data * 0.5)  # as averages are swapped in
    alike("changed around versions")
    for model in (masters, plain):
        with shardkit.sharding_of(model).summon_full_params(), torch.no_grad():
            net_of(model).head.weight.add_(0.25)
    alike("written to as full parameters")
    states = [(m, m.state_dict()) for m in (masters, plain)]
    copies = [(m, {k: v.clone() + 0.125 for k, v in state.items()}) for m, state in states]
    for model, state in copies:
        model.load_state_dict(state)
    alike("loaded")
    optimizers = [
        torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.03) for m in (masters, plain)
    ]

    def steps(count: int) -> None:
        for step in range(count):
            for model, optimizer in zip((masters, plain), optimizers, strict=True):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()

    steps(2)
    shardkit.save(folder, step=1, model=masters, optimizer=optimizers[0])
    before = [numbers(masters), numbers(plain)]
    steps(2)
    alike("trained")
    for model, optimizer in zip((masters, plain), optimizers, strict=True):
        shardkit.restore(folder, model=model, optimizer=optimizer)
    assert all(map(torch.equal, numbers(masters), before[0]))
    alike("restored")
    steps(2)
    alike("trained on")
    whole = [shardkit.WholeParameters(m, torch.optim.SGD, lr=0.1) for m in (masters, plain)]
    optimizers[:] = whole
    steps(2)
    alike("over whole parameters")
    if door != "dtensors":
        masters, plain = copy.deepcopy(masters), copy.deepcopy(plain)
        alike("copied")


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
def test_every_change_of_the_shards_is_computed_with(door: str, tmp_path: Path) -> None:
    rank_pool(2, "gloo").run(_changed, 2, door, str(tmp_path))


def _scaled(rank: int, policy: OffloadPolicy | None, reduce: ReducePolicy | None) -> Numbers:
    model = sharded("FSDP", offload=policy, precision=PrecisionPolicy(compute=torch.bfloat16), reduce=reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = ShardedGradScaler(init_scale=1024.0, growth_interval=2)
    for step in range(5):
        with model.no_sync() if reduce is None else nullcontext():  # type: ignore[operator]
            scaler.scale(loss_of(model, rank, 20 + step)).backward()
        loss = loss_of(model, rank, step) * (float("inf") if (step, rank) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.3)  # type: ignore[operator]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*numbers(model), torch.tensor(scaler.get_scale())]


def test_scaled_accumulated_and_clipped() -> None:
    pool = rank_pool(2, "gloo")
    for reduce in (None, ReducePolicy(order="fixed", microbatches=4)):  # with small units' joined messages
        equal(pool.run(_scaled, MASTERS, reduce), pool.run(_scaled, None, reduce))


# ------------------------------------------------------------ what is refused
def _refused(rank: int) -> None:
    for wrong in (
        {"masters": "nvme"},
        {"parameters": True, "masters": True},
        {"masters": True, "states": False},
    ):
        with pytest.raises(ConfigurationError, match=r"NVMe|name one of them|states can't stay"):
            OffloadPolicy(**wrong)  # type: ignore[arg-type]
    compressions: list[dict[str, Any]] = [
        {"precision": PrecisionPolicy(compression=Compression())},
        {"reduce": ReducePolicy(compression=Compression())},
    ]
    for options in compressions:
        with pytest.raises(ConfigurationError, match="masters=True with compression"):
            FSDP(nn.Linear(4, 4), offload=MASTERS, **options)
    model = sharded("FSDP", offload=MASTERS)
    assert str(shardkit.summary(model)).count("masters, gradients and states") == 5
    fixed = sharded("FSDP", offload=MASTERS, reduce=ReducePolicy(order="fixed"))
    for optimizer, why in (
        (torch.optim.SGD(sharded("FSDP").parameters(), lr=0.1), "lists no shards on the host"),
        (torch.optim.LBFGS([next(model.parameters())]), "LBFGS may look at more"),
        (torch.optim.SGD(fixed.parameters(), lr=0.1), "waits for other micro-batches"),
    ):
        with pytest.raises(ConfigurationError, match=why), shardkit.step_in_backward(optimizer):
            pass
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), numbers(model)
    for scaler in (ShardedGradScaler(), torch.amp.GradScaler("cpu")):
        with (
            pytest.raises(LifecycleError, match=r"GradScaler.scale\(\) has scaled"),
            shardkit.step_in_backward(optimizer),
        ):
            scaler.scale(loss_of(model, rank, 0)).backward()
        scaler.update(1.0)
    # what would be changed in the middle of a batch that ranks may still skip, in whichever order these are entered
    loss = loss_of(model, rank, 0)
    for one, other in (
        (shardkit.SkipOutOfMemory(model), shardkit.step_in_backward(optimizer)),
        (shardkit.step_in_backward(optimizer), shardkit.SkipOutOfMemory(model)),
    ):
        with pytest.raises(LifecycleError, match="inside of SkipOutOfMemory"), one, other:
            loss.backward()
    assert all(map(torch.equal, before, numbers(model)))
    optimizer.zero_grad()
    with shardkit.step_in_backward(optimizer):
        loss_of(model, rank, 0).backward()
        second = loss_of(model, rank, 1)
        with pytest.raises(LifecycleError, match="nothing is left to clip"):
            model.clip_grad_norm_(1.0)  # type: ignore[operator]
        with pytest.raises(LifecycleError, match="a second backward"):
            second.backward()
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="hooks before"), shardkit.step_in_backward(optimizer):
        pass
    models = [FSDP(nn.Linear(n, n), offload=MASTERS) for n in (4, 5)]
    one, other = (torch.optim.Adam(m.parameters()) for m in models)
    for adam, m, n in ((one, models[0], 4), (other, models[1], 5)):
        with shardkit.step_in_backward(adam):
            m(torch.ones(2, n)).sum().backward()
    other.load_state_dict(one.state_dict())
    with pytest.raises(ConfigurationError, match="has loaded"), shardkit.step_in_backward(other):
        pass


def test_what_can_not_be_right_is_refused() -> None:
    rank_pool(2, "simulated").run(_refused)


def test_one_rank_steps_as_many_do() -> None:
    pool = rank_pool(1, "gloo")
    equal(pool.run(train, "fully_shard", {"offload": MASTERS}, True), pool.run(train, "fully_shard", {}))


# ------------------------------------------------------------ activations
class Block(nn.Module):
    """It saves views, a tensor twice, its output, and what was made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 192), nn.Linear(64, 64)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.first(x).chunk(3, -1)
        y = (a.sigmoid() * b).relu_() * c.exp()
        z = y.tanh()
        if self.breaks:
            y.add_(1.0)
            z.mul_(2.0)
        return torch.relu(x + self.second(z))


class Odd(Block):
    """It saves conjugates, what nobody needs any more when it changes, and parameters of another model."""

    def __init__(self) -> None:
        super().__init__()
        other = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        for layer in other:
            fully_shard(layer)
        self.others = [fully_shard(other)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.others[0](x) * 2.0
        assert y.square().shape == y.shape
        z = torch.view_as_complex(y.add_(1.0).unflatten(-1, (32, 2)))
        return super().forward(torch.view_as_real(z * z.conj()).flatten(1).tanh())


BLOCKS, BATCH = 5, 512
SAVED = BATCH * 64 * 4  # bytes of one of them


def _stack(
    door: str, offload: OffloadPolicy | None, device: Any = None, kind: type[Block] = Block
) -> nn.Module:
    torch.manual_seed(0)
    blocks = [kind().to(device) for _ in range(BLOCKS)]
    if door == "FSDP":
        return FSDP(nn.Sequential(*[FSDP(b, offload=offload) for b in blocks]), offload=offload)
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, offload=offload)
    return fully_shard(model, offload=offload)  # type: ignore[no-any-return]


def _with_activations(rank: int, name: str, door: str, offload: OffloadPolicy | None) -> Numbers:
    device = get_backend(name).device()
    model = _stack(door, offload, device, Odd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step + 10 * rank)).to(device)
        x.requires_grad_()
        loss = model(x).square().mean()
        loss.backward(retain_graph=step == 1)
        if step == 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found += [loss.detach().cpu(), x.grad.cpu()]
    return [*found, *numbers(model)]


ACTIVATIONS = OffloadPolicy(activations=True)


@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
def test_saved_activations_come_back_as_they_were(door: str) -> None:
    pool = rank_pool(2, "simulated")
    for policy in (ACTIVATIONS, OffloadPolicy(masters=True, activations=True)):
        equal(
            pool.run(_with_activations, "gloo", door, policy), pool.run(_with_activations, "gloo", door, None)
        )


def _activations_on_the_bus(rank: int) -> tuple[Counter[str], Counter[str]]:
    device = current_device()
    assert device is not None
    model = _stack("FSDP", ACTIVATIONS)
    for _ in range(2):
        copied, waits = Counter(device.copied), Counter(device.host_waits)
        model(torch.randn(BATCH, 64)).square().mean().backward()
        copied, waits = device.copied - copied, device.host_waits - waits
    next(m for m in model.modules() if isinstance(m, Block)).breaks = True
    loss = model(torch.randn(BATCH, 64)).square().mean()
    with pytest.raises(LifecycleError, match="was changed in place"):
        loss.backward()
    return copied, waits


def test_activations_cross_the_bus_once_each_way_and_nobody_waits() -> None:
    """Of all blocks but the last: five of 64 numbers, one of 192, and what relu has kept of its output."""
    for copied, waits in rank_pool(2, "streams").run(_activations_on_the_bus):
        assert copied["down"] == copied["up"] > 0
        assert copied["down"] % (BLOCKS - 1) == 0
        assert 6 * SAVED <= copied["down"] / (BLOCKS - 1) <= 10 * SAVED
        assert not waits


def _held(rank: int, name: str) -> list[int]:
    """Bytes of the device that there are between forward and backward."""
    device, taken = get_backend(name).device(), torch.get_device_module(name).memory_allocated
    found = []
    for offload in (None, ACTIVATIONS):
        model = _stack("FSDP", offload, device)
        for _ in range(2):
            x = torch.randn(BATCH, 64).to(device)
            torch.accelerator.synchronize()
            before = taken()
            loss = model(x).square().mean()
            torch.accelerator.synchronize()
            held = taken() - before
            loss.backward()
        found.append(held)
    return found


@pytest.mark.parametrize(("backend", "world_size"), environments("late"))
def test_activations_leave_the_device(backend: str, world_size: int) -> None:
    """What stays is of the last block, and small."""
    for kept, offloaded in rank_pool(world_size, backend).run(_held, family(backend)):
        assert offloaded < 1.5 * kept / BLOCKS
