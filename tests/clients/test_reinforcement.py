"""A worker in the manner of verl's and prime-rl's: torch's words, weights out by ``full_tensor``, phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from shardkit.torch_fsdp2 import fully_shard
from tests.pools import rank_pool

WORDS, WIDTH, MICRO = 11, 8, 3


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 13), nn.SiLU(), nn.Linear(13, WIDTH)) for _ in range(2)]
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Worker:
    """An actor that is updated, and hands its weights to an engine."""

    def __init__(self, shard: Callable[..., Any], rank: int) -> None:
        torch.manual_seed(7)
        full = Policy().state_dict()  # rank 0's counts
        with torch.device("meta"):
            self.actor: Any = Policy()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        words = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }
        for layer in self.actor.layers:
            shard(layer, reshard_after_forward=True, **words)
        shard([self.actor.norm, self.actor.head], reshard_after_forward=False, **words)
        shard(self.actor, reshard_after_forward=True, **words)
        self.actor.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.actor, full if rank == 0 else {}, options=options)
        assert isinstance(self.actor, FSDPModule)
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-2)

    def update(self, words: torch.Tensor, advantages: torch.Tensor) -> list[float]:
        """One step of several micro-batches, which are reduced with the last; its losses and norm."""
        self.actor.train()
        losses = []
        parts = list(zip(words.chunk(MICRO), advantages.chunk(MICRO), strict=True))
        for k, (part, advantage) in enumerate(parts):
            is_last = k == len(parts) - 1
            self.actor.set_requires_gradient_sync(is_last)
            self.actor.set_is_last_backward(is_last)
            logits = self.actor(part[:, :-1]).float()
            chosen = logits.log_softmax(-1).gather(-1, part[:, 1:, None]).squeeze(-1)
            loss = -(chosen.mean(1) * advantage).mean() / MICRO
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return [*losses, norm.item()]

    def score(self, words: torch.Tensor) -> torch.Tensor:
        """What a reference model is asked, between updates."""
        self.actor.eval()
        with torch.no_grad():
            found = self.actor(words).float()
        self.actor.reshard()
        return found

    def offload(self) -> None:
        """Shards and moments leave the device, and come back."""
        for device in ("cpu", "cpu"):
            self.actor.to(device, non_blocking=True)
            for state in self.optimizer.state.values():
                state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor)})

    def weights(self) -> dict[str, torch.Tensor]:
        """As an engine gets them: one after the other, whole."""
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
            for name, p in self.actor.state_dict().items()
        }


def _worked(rank: int, ours: bool) -> tuple[list[list[float]], torch.Tensor, dict[str, torch.Tensor]]:
    worker, told = Worker(fully_shard if ours else fsdp2, rank), []
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + rank)
        words = torch.randint(WORDS, (2 * MICRO, 6), generator=draw)
        told.append(worker.update(words, torch.randn(2 * MICRO, generator=draw)))
        worker.offload()
        scores = worker.score(words)
    whole = get_model_state_dict(
        worker.actor, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    weights = worker.weights()
    if rank == 0:
        torch.testing.assert_close(dict(whole), weights, rtol=0, atol=0)
    return told, scores, weights


def test_phases_of_a_worker_beside_fsdp2() -> None:
    pool = rank_pool(2)
    for ours, theirs in zip(pool.run(_worked, True), pool.run(_worked, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
