"""Trainings whose bits are compared: by processes over gloo, and in a rehearsal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shardkit
from digits import Job, Progress, Start, train


def digits(rank: int, strategies: tuple[str, ...], world_size: int, start: Start) -> list[list[float]]:
    """Losses of one epoch, and what share of the held-out images is found."""
    found = []
    for strategy in strategies:
        outcome = train(rank, Job(strategy, "gloo", world_size, epochs=1, stop_after=1), start, Progress())
        found.append([*outcome.losses, outcome.accuracy])
    return found


def llama(rank: int, strategies: tuple[str, ...]) -> list[Any]:
    """Losses of three steps, and this rank's parameters afterwards."""
    return [_train_llama(rank, strategy) for strategy in strategies]


def _train_llama(rank: int, strategy: str) -> tuple[list[float], list[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=53, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    layers = model.model.layers
    if strategy == "ddp":
        model = DDP(model, bucket_cap_mb=0.01)
    elif strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        for k, layer in enumerate(layers):
            layers[k] = shardkit.FSDP(layer)
        model = shardkit.FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)  # dropout's
    losses = []
    for step in range(3):
        tokens = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0) if strategy == "ddp" else None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    own = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    return losses, own
