"""Models and optimizers, sharded in every way, that save and restore each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit import OSS, AdaScale, ShardedDDP, WholeParameters, hybrid_groups
from shardkit.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from tests.doors import through

ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


class Model(nn.Module):
    """Several dimensions, a tied weight, buffers, something frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), nn.Tanh())
        self.words = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.words.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(self.words(self.inner(x)) + self.tied(self.inner(x)))
        return found


class Place:
    """A loader that knows where it is, or raises."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def build(kind: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer."""
    if kind.startswith("two_"):
        return _with_two_optimizers(kind, seed)
    model: Any = Model(seed)
    if kind == "plain":
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    if kind in ("oss", "adascale"):
        optimizer: Any = OSS([p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, **ADAM)
        return ShardedDDP(model, optimizer), AdaScale(optimizer) if kind == "adascale" else optimizer
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fsdp2(model.inner, mesh=mesh)
        fsdp2(model, mesh=mesh)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    options: dict[str, Any] = {"align": "rows"} if kind == "fully_shard" else {}
    if kind == "hybrid":
        options["group"], options["replicas"] = hybrid_groups(2)
    if kind == "fairscale":
        model.inner = FairscaleFSDP(model.inner)
        model = FairscaleFSDP(model)
    else:
        doors = {"fsdp": "FSDP", "hybrid": "FSDP", "torch_fsdp": "torch_fsdp_orig", "dtensors": "dtensors"}
        model = through(doors.get(kind, "fully_shard"), model, "inner", **options)
    if kind == "whole":
        return model, WholeParameters(model, torch.optim.AdamW, **ADAM)
    if kind == "whole_muon":
        return model, WholeParameters(model, torch.optim.Muon, lr=0.01)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)


def _with_two_optimizers(kind: str, seed: int) -> tuple[nn.Module, list[Any]]:
    """One over the parameters of ``inner``, of another class than the one over the rest."""
    model: Any = Model(seed)
    if kind == "two_fsdp":
        model = through("FSDP", model, "inner")
    elif kind == "two_fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fsdp2(model.inner, mesh=mesh)
        fsdp2(model, mesh=mesh)
    inner = list(model.inner.parameters())
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in inner)]
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    if kind != "two_oss":
        return model, [torch.optim.SGD(inner, **sgd), torch.optim.AdamW(rest, **ADAM)]
    optimizers = [OSS(inner, torch.optim.SGD, **sgd), OSS(rest, torch.optim.AdamW, **ADAM)]
    return ShardedDDP(model, optimizers), optimizers


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    """The same batch on all ranks."""
    torch.manual_seed(number)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for each in optimizers:
        each.zero_grad()
    model(torch.randn(4, 3, 8)).square().mean().backward()
    for each in optimizers:
        each.step()


def write(rank: int, folder: str, kind: str, steps: int = 2, **options: Any) -> int:
    """Trains, saves, and counts the collectives of that; then trains on and saves again, to be compared."""
    model, optimizer = build(kind)
    for k in range(steps):
        step(model, optimizer, k)
    shardkit.save(f"{folder}/a", model=model, optimizer=optimizer, step=steps, **options)
    step(model, optimizer, steps)
    shardkit.save(f"{folder}/b", model=model, optimizer=optimizer, step=steps + 1, **options)
    return 0


def read(rank: int, folder: str, kind: str, name: str) -> None:
    """Restores, saves that; then trains on and saves again."""
    model, optimizer = build(kind, seed=1)
    if kind != "plain":
        step(model, optimizer, 7)  # there is state to be replaced
    found = shardkit.restore(f"{folder}/a", model=model, optimizer=optimizer)
    shardkit.save(f"{folder}/{name}-a", model=model, optimizer=optimizer, step=found.step)
    step(model, optimizer, found.step)
    shardkit.save(f"{folder}/{name}-b", model=model, optimizer=optimizer, step=found.step + 1)


def content(folder: str | Path) -> dict[str, Any]:
    """A checkpoint as torch reads it, without anything of shardkit's."""
    path = shardkit.latest(folder)
    assert path is not None
    dcp_to_torch_save(path, f"{path}.pt")
    found: dict[str, Any] = torch.load(f"{path}.pt", weights_only=False)
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any], exact: bool = True) -> None:
    """Model and optimizer are equal."""
    for part in ("model", "optimizer"):
        assert a[part].keys() == b[part].keys()
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(a["model"], b["model"], **tolerance)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], **tolerance)
    for mine, theirs in zip(a["optimizer"]["param_groups"], b["optimizer"]["param_groups"], strict=True):
        named = [{n for n in group["params"] if not n.startswith("frozen")} for group in (mine, theirs)]
        assert named[0] == named[1]
        rest = [{k: v for k, v in group.items() if k != "params"} for group in (mine, theirs)]
        assert rest[0] == rest[1]
