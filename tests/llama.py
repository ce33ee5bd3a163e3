"""A small language model in the manner of Llama, over whichever parallel layers it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Size:
    """Every count is divisible by 4, none a power of two where that would hide a mix-up."""

    vocabulary: int = 36
    width: int = 48
    layers: int = 2
    heads: int = 12
    key_heads: int = 4
    hidden: int = 60
    length: int = 16


def copy_weights(_: torch.Tensor) -> torch.Tensor:
    """As Llama's code does: parameters come from a checkpoint."""
    return _


class PlainLayers:
    """The unsharded layers under the parallel ones' names."""

    @staticmethod
    def column(n: int, m: int) -> nn.Module:
        return nn.Linear(n, m, bias=False)

    row = column

    @staticmethod
    def embedding(n: int, m: int) -> nn.Module:
        return nn.Embedding(n, m)

    @staticmethod
    def head(n: int, m: int) -> nn.Module:
        return nn.Linear(n, m, bias=False)


class ParallelLayers:
    """Those of a ``layers`` module, fairscale's or shardkit's."""

    def __init__(self, layers: Any, init_method: Callable[..., Any] = copy_weights) -> None:
        self._layers, self._init = layers, init_method

    def column(self, n: int, m: int) -> nn.Module:
        return self._layers.ColumnParallelLinear(
            n, m, bias=False, gather_output=False, init_method=self._init
        )

    def row(self, n: int, m: int) -> nn.Module:
        return self._layers.RowParallelLinear(
            n, m, bias=False, input_is_parallel=True, init_method=self._init
        )

    def embedding(self, n: int, m: int) -> nn.Module:
        return self._layers.ParallelEmbedding(n, m, init_method=self._init)

    def head(self, n: int, m: int) -> nn.Module:
        return self._layers.ColumnParallelLinear(n, m, bias=False, init_method=self._init)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [batch, heads, time, size], in pairs of neighbours."""
    time, size = x.shape[-2:]
    angle = torch.outer(torch.arange(time), 10000.0 ** (-torch.arange(0, size, 2) / size))
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal, with fewer keys than queries; each rank has heads of its own."""

    def __init__(self, size: Size, layers: Any, parts: int) -> None:
        super().__init__()
        head = size.width // size.heads
        self.size, self.heads, self.key_heads = head, size.heads // parts, size.key_heads // parts
        self.wq = layers.column(size.width, size.heads * head)
        self.wk = layers.column(size.width, size.key_heads * head)
        self.wv = layers.column(size.width, size.key_heads * head)
        self.wo = layers.row(size.heads * head, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            y = y.unflatten(-1, (heads, self.size)).transpose(1, 2)
            return y.repeat_interleave(self.heads // heads, dim=1)

        q = rotate(split(self.wq(x), self.heads))
        k = rotate(split(self.wk(x), self.key_heads))
        y = F.scaled_dot_product_attention(q, k, split(self.wv(x), self.key_heads), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, size: Size, layers: Any) -> None:
        super().__init__()
        self.w1 = layers.column(size.width, size.hidden)
        self.w2 = layers.row(size.hidden, size.width)
        self.w3 = layers.column(size.width, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size, layers: Any, parts: int) -> None:
        super().__init__()
        self.attention = Attention(size, layers, parts)
        self.feed_forward = FeedForward(size, layers)
        self.attention_norm, self.ffn_norm = RMSNorm(size.width), RMSNorm(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens [batch, time] -> logits [batch, time, vocabulary].

    Args:
        layers: PlainLayers or ParallelLayers.
        parts: ranks that share the model.
    """

    def __init__(self, size: Size, layers: Any, parts: int = 1) -> None:
        super().__init__()
        self.tok_embeddings = layers.embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList([Block(size, layers, parts) for _ in range(size.layers)])
        self.norm = RMSNorm(size.width)
        self.output = layers.head(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def part_of(name: str, value: torch.Tensor, rank: int, parts: int) -> torch.Tensor:
    """What a rank holds of a whole parameter: as Llama's checkpoints are cut."""
    if "norm" in name:
        return value
    columns = any(part in name for part in ("wo.", "w2.", "tok_embeddings."))
    return value.chunk(parts, dim=1 if columns else 0)[rank]


def load_part(model: nn.Module, whole: nn.Module, rank: int, parts: int) -> None:
    """Gives a rank's model its parts of an unsharded one."""
    model.load_state_dict({n: part_of(n, v, rank, parts) for n, v in whole.state_dict().items()})
