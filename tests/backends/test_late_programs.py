"""Users' programs on devices that torch knows through PrivateUse1: scaling, OSS, checkpoints, offload, skipped batches.

The numbers are the CPU's, on as many ranks. torch_tpu itself: see tests/torch_tpu.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
import train_anything
from shardkit import FSDP, OSS, OffloadPolicy, ShardedDDP
from shardkit.backend import get_backend
from shardkit.nn import checkpoint_wrapper
from shardkit.training.grad_scaler import ShardedGradScaler
from tests.backends.environments import environments, family
from tests.pools import rank_pool

Numbers = list[float]


class _Hungry(nn.Module):
    """Memory ends in its forward, when told so."""

    empty = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.empty:
            raise torch.OutOfMemoryError("no memory")
        return x


def _model(device: torch.device, *, wrap: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).to(device) for _ in range(3)]
    return nn.Sequential(*(blocks if wrap is None else map(wrap, blocks)))


def _loss(model: nn.Module, step: int, rank: int, device: torch.device) -> torch.Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.to(device)).float().pow(2).mean()


def _numbers(model: nn.Module) -> Numbers:
    values = [v.detach().cpu().float().reshape(-1) for v in model.state_dict().values()]
    return torch.cat(values).tolist()


def scaled(rank: int, backend: str) -> Numbers:
    """Loss scaling under autocast; one rank's loss overflows in one step."""
    device = get_backend(backend).device()
    model = FSDP(_model(device, wrap=FSDP))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = ShardedGradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = _loss(model, step, rank, device)
        scaler.scale(loss * (float("inf") if (step, rank) == (3, 1) else 1.0)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.3)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0], scales
    return _numbers(model)


def sharded_optimizer(rank: int, backend: str) -> Numbers:
    """ShardedDDP over OSS, clipped, its state gathered and loaded."""
    device = get_backend(backend).device()
    model = _model(device)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
    wrapped = ShardedDDP(model, optimizer)
    for step in range(4):
        wrapped.zero_grad()
        _loss(wrapped, step, rank, device).backward()
        optimizer.clip_grad_norm(0.3)
        optimizer.step()
        if step == 1:
            optimizer.consolidate_state_dict(0)
            state = optimizer.state_dict() if rank == 0 else None
            optimizer.load_state_dict(get_backend(backend).group().broadcast_object(state, 0))
    return _numbers(model)


def out_of_memory(rank: int, backend: str) -> Numbers:
    """One rank's memory ends in one batch; activations are computed again."""
    device = get_backend(backend).device()
    hungry = _Hungry()
    blocks = _model(device, wrap=lambda block: FSDP(checkpoint_wrapper(block)))
    model = FSDP(nn.Sequential(blocks[0], hungry, *blocks[1:]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(6):  # two steps have to be alike before one can be left
        hungry.empty = (step, rank) == (4, 0)
        with skip:
            _loss(model, step, rank, device).backward()
        assert skip.skipped == (step == 4)
        if not skip.skipped:
            optimizer.step()
        optimizer.zero_grad()
    assert str(shardkit.summary(model))
    return _numbers(model)


def frozen_on_the_host(rank: int, backend: str) -> Numbers:
    """Frozen weights come from host memory, ahead of their use."""
    device, reshard = get_backend(backend).device(), shardkit.ReshardPolicy(frozen="host")
    model = _model(device)
    for block in model:
        block[0].requires_grad_(False)
        shardkit.fully_shard(block, reshard=reshard)
    shardkit.fully_shard(model, reshard=reshard)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        _loss(model, step, rank, device).backward()
        optimizer.step()
        optimizer.zero_grad()
    with shardkit.sharding_of(model).summon_full_params():
        return torch.cat([p.detach().cpu().view(-1) for p in model.parameters()]).tolist()


def offloaded(rank: int, backend: str) -> Numbers:
    """Parameters and inputs of activations on the host."""
    device = get_backend(backend).device()
    offload = OffloadPolicy(parameters=True)

    def wrap(block: nn.Module) -> nn.Module:
        return FSDP(checkpoint_wrapper(block, offload_to_cpu=True), offload=offload, device=device)

    model = FSDP(_model(torch.device("cpu"), wrap=wrap), offload=offload, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step, rank, device).backward()
        model.clip_grad_norm_(0.3)
        optimizer.step()
    return _numbers(model)


def saved(rank: int, backend: str, folder: str) -> Numbers:
    """A checkpoint in the middle, read by a model of other values."""
    device = get_backend(backend).device()
    made: list[Numbers] = []
    for begin in (0, 2):
        model = FSDP(_model(device, wrap=FSDP))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if begin:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            assert shardkit.restore(folder, model=model, optimizer=optimizer).step == begin
        for step in range(begin, 4):
            optimizer.zero_grad()
            _loss(model, step, rank, device).backward()
            optimizer.step()
            if step == 1:
                shardkit.save(folder, model=model, optimizer=optimizer, step=2)
        made.append(_numbers(model))
    assert made[0] == made[1]
    return made[1]


def anything(rank: int, backend: str, folder: str) -> Numbers:
    """The example, as it stands: two epochs, and a third one after a restart."""
    options = argparse.Namespace(checkpoints=folder, epochs=1, batch=240, save_every=4, workers=0)
    first = train_anything.train(rank, options)
    del first
    options.epochs = 2
    train_anything.train(rank, options)
    assert shardkit.latest(folder)
    return []


everywhere = pytest.mark.parametrize(
    ("backend", "world_size"), [e for e in environments("late", "tpu", "torch_tpu") if e.values[1] > 1]
)


def _compare(backend: str, program: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> None:
    host = args and tuple(f"{a}/host" for a in args)
    expected = rank_pool(2, "gloo").run(program, "gloo", *host)
    found = rank_pool(2, backend).run(program, family(backend), *args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@everywhere
def test_loss_scaling_under_autocast(backend: str, world_size: int) -> None:
    _compare(backend, scaled, tolerance=2e-2)


@everywhere
@pytest.mark.parametrize("program", [sharded_optimizer, out_of_memory])
def test_numbers_of_the_cpu(backend: str, world_size: int, program: Callable[..., Any]) -> None:
    _compare(backend, program)


@everywhere
def test_on_the_host(backend: str, world_size: int) -> None:
    if backend == "torch_tpu":
        pytest.skip("XLA's plugin for CPUs has no pinned memory, which torch_tpu's copies to the host take")
    _compare(backend, offloaded)
    _compare(backend, frozen_on_the_host)


@everywhere
def test_checkpoints(backend: str, world_size: int, tmp_path: Path) -> None:
    _compare(backend, saved, str(tmp_path))


@everywhere
def test_the_example_goes_on_after_a_restart(backend: str, world_size: int, tmp_path: Path) -> None:
    if backend == "torch_tpu":
        pytest.skip("its attention is a program for TPUs alone (tpu_custom_call)")
    rank_pool(world_size, backend).run(anything, family(backend), str(tmp_path))
