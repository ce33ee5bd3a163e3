"""A vision transformer small enough to train on a CPU; deterministic, as it has no dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IMAGE, PATCH, CLASSES = 8, 2, 10
TOKENS = (IMAGE // PATCH) ** 2


class Block(nn.Module):
    """Pre-norm transformer block: x of shape [batch, tokens, dim] to the same shape."""

    def __init__(
        self, dim: int, heads: int, *, qkv_bias: bool = False, mlp_ratio: float = 4.0,
        att_dropout: float = 0.0, mlp_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        width = int(mlp_ratio * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))
        self.att_dropout, self.mlp_dropout = att_dropout, mlp_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropped = self.att_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        return x + F.dropout(self.mlp(self.norm2(x)), self.mlp_dropout, self.training)


class DigitTransformer(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, dim: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, dim // 2, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(dim // 2, dim, kernel_size=PATCH, stride=PATCH),
        )
        self.positions = nn.Parameter(torch.randn(1, TOKENS, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits
