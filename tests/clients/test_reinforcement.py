"""A worker in the manner of verl's and prime-rl's: torch's words, weights out by ``full_tensor``, phases, packing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
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

import shardkit
from shardkit.torch_fsdp2 import fully_shard
from tests.pools import on_ranks, rank_pool

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


# ------------------------------------------------------------ sequences of different lengths, packed by tokens
BUDGET = 16


def _rollouts(step: int, rank: int) -> list[tuple[torch.Tensor, float]]:
    """What was sampled: sequences and advantages; in one step one rank has got nothing."""
    draw = random.Random(10 * step + rank)
    found = [(draw.randint(2, 12), draw.uniform(-1, 1)) for _ in range(draw.randint(2, 9))]
    start = draw.randrange(WORDS)
    return [] if (step, rank) == (1, 0) else [((torch.arange(n) + start) % WORDS, a) for n, a in found]


def _packed(rollouts: list[tuple[torch.Tensor, float]]) -> list[list[tuple[torch.Tensor, float]]]:
    """As many as fit into a micro-batch, first fit, whose number ranks don't agree on (verl's dynamic batches do)."""
    batches: list[list[tuple[torch.Tensor, float]]] = []
    for item in rollouts:
        rooms = (b for b in batches if sum(len(w) for w, _ in b) + len(item[0]) <= BUDGET)
        batch = next(rooms, None)
        if batch is None:
            batches.append(batch := [])
        batch.append(item)
    return batches


def _loss(actor: nn.Module, batch: list[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, int]:
    """The mean over predicted tokens of sequences in a row, none of which predicts the next one's first."""
    words = torch.cat([w for w, _ in batch])
    mask = torch.cat([(torch.arange(len(w)) < len(w) - 1).float() * a for w, a in batch])
    tokens = len(words) - len(batch)
    chosen = actor(words).log_softmax(-1)[:-1].gather(-1, words[1:, None]).squeeze(-1)
    return -(chosen * mask[:-1]).sum() / tokens, tokens


@pytest.mark.parametrize("once", [False, True])
@on_ranks(2)
def test_packed_sequences_beside_one_process(rank: int, once: bool) -> None:
    torch.manual_seed(7)
    plain, actor = Policy().double(), Policy().double()
    actor.load_state_dict(plain.state_dict())
    for part in (*actor.layers, [actor.norm, actor.head], actor):
        fully_shard(part)
    optimizer, truth = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (actor, plain))
    for step in range(4):
        with shardkit.uneven(actor, once=once) as work:
            for batch in _packed(_rollouts(step, rank)):
                loss, tokens = _loss(actor, batch)
                work.weighted(loss, tokens).backward()
        everything = [item for r in range(2) for item in _rollouts(step, r)]
        _loss(plain, everything)[0].backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (actor, plain)]
        assert isinstance(norms[0], DTensor)
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-10, atol=0)
        for each in (optimizer, truth):
            each.step()
            each.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    torch.testing.assert_close(
        get_model_state_dict(actor, options=options), dict(plain.state_dict()), rtol=1e-10, atol=1e-12
    )
