"""Leaves of the models that programs train: small blocks, each with a trait that sharding has to survive.

Every block maps features [B, D] to features [B, D]. ``route`` picks a branch and may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 5


class Odd(nn.Module):
    """Parameters of awkward sizes: 0-dim, one element, seven elements, a transposed (non-contiguous) matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.1))
        self.single = nn.Parameter(torch.tensor([0.9]))
        self.seven = nn.Parameter(torch.randn(7) * 0.1)
        self.transposed = nn.Parameter((torch.randn(width, 3) * 0.1).t())

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x * self.scalar + self.single + self.seven.sum() + self.transposed.sum(0)


class Empty(nn.Module):
    """A parameter without elements beside a usual one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x + self.bias + self.nothing.sum()


class Convolution(nn.Module):
    """Convolution and batch norm over the features as a line of pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x + self.norm(self.conv(x.unsqueeze(1))).mean(1)


class RunningMean(nn.Module):
    """Training itself depends on buffers: one floating, one counter, one that state dicts leave out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.ones(2), persistent=False)
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.fixed: torch.Tensor

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        y = x + self.weight * (1 + self.mean) * self.fixed.mean() + 0.01 * self.count
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                self.count += 1
        return y


class Embedded(nn.Module):
    """Adds rows of a table; which rows depends on the data. Gradients may be sparse."""

    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width, sparse=sparse)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        index = (x.detach().abs().sum(1) * 7).long() % VOCABULARY
        return x + self.table(index)


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(width, width, bias=False)
        self.decode = nn.Linear(width, width)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class Attention(nn.Module):
    """Self-attention over three shifted copies of the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # without bias_kv the bias of keys has no gradient but rounding, which RMSprop makes steps of
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        tokens = torch.stack([x, x.roll(1, 1), x.roll(2, 1)], 1)
        return x + self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class Branch(nn.Module):
    """Two ways, of which a forward takes one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return self.ways[route](x)


class Unused(nn.Module):
    """Holds a layer that no forward uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x


class Checkpointed(nn.Module):
    """Activation checkpointing, either kind, around a layer with dropout."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        if self.reentrant and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # the reentrant kind needs an input that asks for a gradient
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Plain(nn.Module):
    """A layer with the call of a block."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return self.layers(x)


class HalfPrecision(nn.Module):
    """Parameters of another dtype than the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return self  # stays in fp32 when the model is cast

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


class SharedLinear(nn.Module):
    """All of these in one model have the same weight, and each its own bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return torch.tanh(self.linear(x))


LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: Plain(nn.Linear(d, d), nn.Tanh()),
    "no_bias": lambda d: Plain(nn.Linear(d, d, bias=False)),
    "norm": lambda d: Plain(nn.LayerNorm(d)),
    "mlp": lambda d: Plain(nn.Linear(d, 3 * d + 1), nn.GELU(), nn.Linear(3 * d + 1, d)),
    "dropout": lambda d: Plain(nn.Linear(d, d), nn.Dropout(0.3)),
    "frozen": lambda d: Plain(nn.Linear(d, d)).requires_grad_(False),
    "odd": Odd,
    "empty": Empty,
    "conv": Convolution,
    "batch_norm": lambda d: Plain(nn.BatchNorm1d(d)),
    "running_mean": RunningMean,
    "embedding": lambda d: Embedded(d, sparse=False),
    "sparse": lambda d: Embedded(d, sparse=True),
    "tied": Tied,
    "attention": Attention,
    "branch": Branch,
    "unused": Unused,
    "checkpoint": lambda d: Checkpointed(d, reentrant=False),
    "checkpoint_reentrant": lambda d: Checkpointed(d, reentrant=True),
    "mixed_dtype": HalfPrecision,
    "shared": SharedLinear,
}
