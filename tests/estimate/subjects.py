"""Trainings whose memory is estimated and measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.backend import get_backend
from shardkit.tools.estimate import STRATEGIES, Subject, with_adapters
from tests.figures.counters import Memory, memory_of

WORDS, WIDTH, TOKENS = 512, 128, 64
ADAMW: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.AdamW, {"lr": 1e-3})
SGD: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        d = WIDTH
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Language(nn.Module):
    def __init__(self, tied: bool = False, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.recomputes = False
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            for block in self.blocks[:2]:
                block.requires_grad_(False)
            self.words.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def language_units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = unit(block)


def _like(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def language_loss(model: nn.Module, batch: int) -> torch.Tensor:
    tokens = torch.zeros(batch, TOKENS, dtype=torch.int64, device=_like(model))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def recomputing() -> nn.Module:
    model = Language()
    model.recomputes = True
    return model


def layers() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 700), nn.ReLU(), nn.Linear(700, 256)) for _ in range(5)]
    )


def in_a_row(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    for k in range(len(model)):
        model[k] = unit(model[k])


def layers_loss(model: nn.Module, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.zeros(batch, 256, device=_like(model), dtype=dtype)).float().square().mean()


def images() -> nn.Module:
    def part(channels: int, more: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, more, 3, padding=1), nn.BatchNorm2d(more), nn.ReLU(), nn.MaxPool2d(2)
        )

    return nn.Sequential(
        part(3, 32), part(32, 64), part(64, 128), nn.Sequential(nn.Flatten(), nn.Linear(2048, 10))
    )


def images_loss(model: nn.Module, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.zeros(batch, 3, 32, 32, device=_like(model), dtype=dtype)
    return F.cross_entropy(model(x).float(), torch.zeros(batch, dtype=torch.int64, device=x.device))


def transformers_model(kind: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=300, num_key_value_heads=2)
    else:
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=TOKENS
        )
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config)


def transformers_loss(model: nn.Module, batch: int) -> torch.Tensor:
    tokens = torch.zeros(batch, TOKENS, dtype=torch.int64, device=_like(model))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def transformers_units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    from shardkit.tools.estimate import blocks_of

    blocks_of(model, unit)


SUBJECTS: dict[str, Subject] = {
    s.name: s
    for s in (
        Subject("layers", layers, layers_loss, ADAMW, in_a_row),
        Subject("layers, SGD", layers, layers_loss, SGD, in_a_row),
        Subject("language", Language, language_loss, ADAMW, language_units),
        Subject("language, tied", partial(Language, tied=True), language_loss, ADAMW, language_units),
        Subject("language, dropout", partial(Language, dropout=0.1), language_loss, ADAMW, language_units),
        Subject(
            "language, partly frozen", partial(Language, frozen=True), language_loss, ADAMW, language_units
        ),
        Subject("language, recomputed", recomputing, language_loss, ADAMW, language_units),
        Subject("language, bfloat16", Language, language_loss, ADAMW, language_units, torch.bfloat16),
        Subject("images", images, images_loss, ADAMW, in_a_row),
        Subject("Llama", partial(transformers_model, "llama"), transformers_loss, ADAMW, transformers_units),
        Subject("GPT-2", partial(transformers_model, "gpt2"), transformers_loss, ADAMW, transformers_units),
    )
}


ADAPTED = with_adapters(SUBJECTS["language"], 2, "packed")
SUBJECTS["language, adapters on packed weights"] = ADAPTED
SUBJECTS["language, adapters on kept weights"] = with_adapters(SUBJECTS["language"], 2, "keep")


def measured(rank: int, name: str, strategy: str, batch: int) -> Memory:
    """What a rank of gloo really takes."""
    subject = SUBJECTS[name]

    def build() -> Any:
        torch.manual_seed(0)
        backend = get_backend("gloo")
        return STRATEGIES[strategy](subject, subject.model(), backend)

    def step(sharded: Any, _: int) -> None:
        sharded.optimizer.zero_grad(set_to_none=True)
        subject.loss(sharded.model, batch).backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad(set_to_none=True)

    return memory_of(build, step)
