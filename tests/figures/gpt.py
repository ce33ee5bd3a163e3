"""The model that figures and benchmarks use, and its theory.

Legend: P bytes of all parameters (fp32), W world size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, DEPTH, HEADS = 4096, 128, 384, 6, 6
BATCH, LENGTH = 2, 64
PARAMETERS = 13_842_432
P = 4 * PARAMETERS
LARGEST = 4 * VOCABULARY * WIDTH  # bytes of the largest parameter (the embedding, and the head)
BLOCK = 4 * (12 * WIDTH**2 + 13 * WIDTH)  # bytes of a block's parameters
ROOT = P - DEPTH * BLOCK  # bytes of what is in no block


class Block(nn.Module):
    """Pre-norm transformer block. x is [B, T, width]."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
        return x + self.out(functional.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    """By default 13,842,432 parameters: tok, pos, 6 blocks, ln, head (untied, without bias)."""

    def __init__(
        self, vocabulary: int = VOCABULARY, context: int = CONTEXT, width: int = WIDTH, depth: int = DEPTH,
        heads: int = HEADS, block: type[Block] = Block,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([block(width, heads) for _ in range(depth)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class TinyMLP(nn.Module):
    """100 small layers: what is left is overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(100)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.add(x, torch.relu(layer(x)), alpha=0.1)  # 100 sums must not overflow
        return x


class AdaptedLinear(nn.Module):
    """A frozen layer with a trainable correction of low rank beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRA(TinyMLP):
    """Eight of these, of rank 4."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([AdaptedLinear(32, 4) for _ in range(8)])


MODELS = {"gpt": GPT, "tinymlp": TinyMLP, "lora": LoRA}


def build(name: str) -> nn.Module:
    """One of ``MODELS``, the same on every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def loss(name: str, model: nn.Module, count: int, rank: int, length: int = 0) -> torch.Tensor:
    """The loss of a rank's ``count``-th batch, with so many tokens (0: LENGTH)."""
    generator = torch.Generator().manual_seed(count * 131 + rank)
    if name == "gpt":
        tokens = torch.randint(0, VOCABULARY, (BATCH, (length or LENGTH) + 1), generator=generator)
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    x = torch.randn(16, 32, generator=generator)
    return model(x).square().mean()


def theory_sent(world_size: int) -> float:
    """Bytes a rank sends in a step of ZeRO-2: a reduce-scatter and an all-gather."""
    return 2 * P * (world_size - 1) / world_size


def theory_resident(world_size: int) -> float:
    """Bytes between steps: parameters, and Adam's two moments of a rank's part."""
    return P + 2 * P / world_size


def theory_peak(world_size: int) -> float:
    """Bytes at most: that, the gradients of a rank's part, and two of the largest parameter on their way."""
    return theory_resident(world_size) + P / world_size + 2 * LARGEST


def fsdp_sent(world_size: int, reshard: bool = True) -> float:
    """Bytes a rank sends in a step of ZeRO-3 with one unit a block: reduce-scatter, gathering, and gathering again.

    Backward begins with the root and the last block: these need not be gathered a second time.
    """
    again = P - ROOT - BLOCK if reshard else 0
    return (2 * P + again) * (world_size - 1) / world_size


def fsdp_resident(world_size: int) -> float:
    """Bytes between steps: a rank's part of the parameters and of Adam's two moments."""
    return 3 * P / world_size


def fsdp_peak(world_size: int) -> float:
    """Bytes at most: that, the gradients of a rank's part, the root with its gradients, and a block."""
    return 4 * P / world_size + 2 * ROOT + BLOCK
