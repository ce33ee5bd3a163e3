"""Trainings whose steps have K micro-batches, on however many ranks: what they leave is told to the bit."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import (
    FSDP,
    OSS,
    ReducePolicy,
    ShardedDDP,
    WholeParameters,
    fully_shard,
    hybrid_groups,
    sharding_of,
)
from shardkit.training.data import seed_generators
from tests.fsdp_models import WIDTH, Adapted, Recurrent, Tied

K = 24


class Routed(nn.Module):
    """Each row goes to one of three layers: some have no rows in a micro-batch, and no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        out, chosen = torch.zeros_like(x), weights.argmax(-1)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                mask = (chosen == k).unsqueeze(-1)
                out = out + mask * weights[..., k : k + 1] * expert(x)
        return out


class Dropped(nn.Module):
    """Leaves out layers at random, and recomputes the others in backward, where there is dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def _compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
    model.compile(backend="aot_eager")
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 13), nn.Dropout(0.2), nn.Tanh(), nn.Linear(13, 5, bias=False)),
    "conv": lambda: nn.Sequential(nn.Conv1d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.Linear(WIDTH, 3)),
    "lstm": lambda: nn.Sequential(nn.Flatten(), Recurrent()),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True),
    "tied": Tied,
    "routed": Routed,
    "adapted": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()),
    "dropped": lambda: nn.Sequential(Dropped(), nn.Linear(WIDTH, 2)),
    "compiled": _compiled,
}  # fmt: skip
STRATEGIES = ("fsdp", "units", "rows", "sharded_ddp", "whole")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


class Run:
    """A model and its optimizer under a strategy."""

    def __init__(self, family: str, strategy: str, optimizer: str = "adamw", **policy: Any) -> None:
        seed_generators(5)
        inner = FAMILIES[family]()
        reduce = ReducePolicy(**{"order": "fixed", "microbatches": K, **policy})
        where: Any = {}
        if strategy == "hybrid":
            where["group"], where["replicas"] = hybrid_groups(2)
        kind, options = OPTIMIZERS[optimizer]
        self.inner, self.optimizer, self.model = inner, None, inner
        if strategy == "sharded_ddp":
            self.optimizer = OSS([p for p in inner.parameters() if p.requires_grad], kind, **options)
            self.model = ShardedDDP(inner, self.optimizer, reduce=reduce)
            return
        if strategy == "fsdp":
            self.model = FSDP(inner, reduce=reduce)
        else:
            whole = [
                m
                for m in inner.children()
                if any(True for _ in m.parameters()) and not isinstance(m, nn.ModuleList) and family != "tied"
            ]
            for m in whole if strategy != "rows" else ():
                fully_shard(m, reduce=reduce, dtensors=strategy == "dtensors", **where)
            fully_shard(inner, reduce=reduce, dtensors=strategy == "dtensors", **where)
        if strategy == "whole":
            self.optimizer = WholeParameters(self.model, torch.optim.Muon, lr=0.02)
        else:
            self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], **options)

    def backward(
        self, number: int, factor: float, scale: Callable[[Any], Any] = lambda loss: loss
    ) -> torch.Tensor:
        """One micro-batch's."""
        with shardkit.microbatch(number):
            x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = (self.model(x) - 1).square().mean() * factor
            scale(loss).backward()
        return loss

    def clip(self, norm: float, torchs: bool) -> torch.Tensor:
        if torchs:  # a rank without a gradient takes no part in it
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        if isinstance(self.optimizer, OSS):
            return self.optimizer.clip_grad_norm(norm)
        return sharding_of(self.model).clip_grad_norm_(norm)

    def digest(self) -> str:
        """Of all weights."""
        if isinstance(self.model, ShardedDDP):
            values = self.model.module.state_dict()
        else:
            with sharding_of(self.model).summon_full_params():
                values = {k: v.clone() for k, v in self.model.state_dict().items()}
        whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values.values()]
        return hashlib.sha1(b"".join(v.detach().numpy().tobytes() for v in whole)).hexdigest()


def train(
    rank: int, world: int, family: str, strategy: str, optimizer: str = "adamw", clip: float = 0.0,
    torchs: bool = False, uneven: bool = False, first: int = 0, last: int = 3, folder: str = "", count: int = K,
    **policy: Any,
) -> list[object]:  # fmt: skip
    """Losses and norms of steps, and a digest of what is left; with a folder, from and to a checkpoint in it."""
    run = Run(family, strategy, optimizer, microbatches=count, **policy)
    if folder and any(Path(folder).iterdir()):
        shardkit.restore_training(folder, model=run.model, optimizer=run.optimizer)
    told: list[object] = []
    for step in range(first, last):
        with shardkit.uneven(run.model) if uneven else contextlib.nullcontext():
            losses = [run.backward(step * count + k, 1 + k % 3) for k in range(rank, count, world)]
        told.append(shardkit.mean_loss(losses).item())
        if clip:
            told.append(run.clip(clip, torchs).item())
        run.optimizer.step()
        run.model.zero_grad()
        run.optimizer.zero_grad()
    if folder:
        shardkit.save_training(folder, model=run.model, optimizer=run.optimizer, step=last)
    return [*told, run.digest()]
