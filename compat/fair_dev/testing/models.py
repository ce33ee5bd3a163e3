"""Models that fairscale's tests share; to be had from :mod:`shardkit.fair_dev.testing.testing`."""

from __future__ import annotations

import torch
from torch import nn


class IdentityLayer(nn.Module):
    """A parameter as a module: forward returns it.

    Args:
        size: its numel.
        scale: standard deviation of its values.
    """

    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size))

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        return self.weight


class _Block(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(embed_dim)
        self.ln_2 = nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, embed_dim * 4), nn.GELU(), nn.Linear(embed_dim * 4, embed_dim)
        )

    def forward(self, *inputs: torch.Tensor, **kwargs: object) -> torch.Tensor:
        x = self.ln_1(inputs[0])  # [T, B, E]
        hidden = torch.full((len(x), len(x)), -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        x = x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A small image-GPT.

    Args:
        embed_dim, num_heads, num_layers: of the transformer.
        num_positions: longest sequence.
        num_vocab: number of tokens.
        num_classes: number of classes of a sequence.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        num_positions: int,
        num_vocab: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.sos = nn.Parameter(torch.randn(embed_dim))  # start of sequence
        self.token_embeddings = nn.Embedding(num_vocab, embed_dim)
        self.position_embeddings = nn.Embedding(num_positions, embed_dim)
        self.layers = nn.ModuleList(_Block(embed_dim, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_vocab, bias=False)
        self.clf_head = nn.Linear(embed_dim, num_classes)

    def forward(
        self, x: torch.Tensor, classify: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits of tokens [T, B, vocabulary]; with ``classify``, logits of classes [B, classes] before them.

        Args:
            x: tokens [T, B], int64.
            classify: whether to classify the sequence too.
        """
        h = self.token_embeddings(x)  # [T, B, E]
        h = torch.cat([self.sos.expand(1, x.shape[1], -1), h[:-1]])
        h = h + self.position_embeddings(torch.arange(len(x), device=x.device))[:, None]
        for layer in self.layers:
            h = layer(h)
        h = self.ln_f(h)
        logits = self.head(h)
        return (self.clf_head(h.mean(0)), logits) if classify else logits


class DeviceAndTypeCheckModule(nn.Module):
    """A layer and a loss that raise AssertionError where a tensor has not the dtype or device that is expected.

    Args:
        expected_*: what to expect; None: anything.
    """

    def __init__(
        self,
        expected_input_dtype: torch.dtype | None = None,
        expected_input_device: torch.device | None = None,
        expected_param_dtype: torch.dtype | None = None,
        expected_param_device: torch.device | None = None,
        expected_loss_dtype: torch.dtype | None = None,
        expected_loss_device: torch.device | None = None,
        expected_buffer_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.expected_input_dtype = expected_input_dtype
        self.expected_input_device = expected_input_device
        self.expected_param_dtype = expected_param_dtype
        self.expected_param_device = expected_param_device
        self.expected_loss_dtype = expected_loss_dtype
        self.expected_loss_device = expected_loss_device
        self.expected_buffer_dtype = expected_buffer_dtype
        self.linear = nn.Linear(5, 5)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.rand(5))

    @staticmethod
    def _check(key: str, found: object, expected: object) -> None:
        if expected is not None and found != expected:
            raise AssertionError(f"{key} is {found}, expected {expected}")

    def forward(self, *input: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """A number, from input [B, 5]."""
        (x, *_), weight = input, self.linear.weight
        self._check("input.dtype", x.dtype, self.expected_input_dtype)
        self._check("input.device", x.device, self.expected_input_device)
        self._check("param.dtype", weight.dtype, self.expected_param_dtype)
        self._check("param.device", weight.device, self.expected_param_device)
        self._check("buffer.dtype", self.buffer.dtype, self.expected_buffer_dtype)
        loss = (self.linear(x + self.buffer) + self.buffer).sum()
        self._check("loss.dtype", loss.dtype, self.expected_loss_dtype)
        self._check("loss.device", loss.device, self.expected_loss_device)
        return loss
