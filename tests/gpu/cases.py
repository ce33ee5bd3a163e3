"""Which models are trained, how, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardkit import OffloadPolicy
from tests.figures import implementations
from tests.figures.gpt import GPT, Block
from tests.figures.implementations import IMPLEMENTATIONS, Trainer

FITS = 0.6  # part of the device's memory that parameters, gradients and Adam's moments may take


class Size(NamedTuple):
    """A GPT; as many of its layers as fit are trained."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int

    def outside(self) -> int:
        """Parameters that are in no layer."""
        return (2 * self.vocabulary + self.tokens + 2) * self.width

    def layer(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    def fitting(self, memory: int, variant: Variant) -> int:
        """How many layers fit into so many bytes, at most all."""
        parameters = FITS * memory / variant.nbytes - self.outside()
        return max(1, min(self.depth, int(parameters / self.layer())))


SIZES = {
    "tiny": Size(32, 2, 2, 64, 16, 2),
    "124M": Size(768, 12, 12, 50304, 1024, 8),
    "1.3B": Size(2048, 24, 16, 50304, 1024, 4),
    "4B": Size(2560, 36, 32, 151936, 1024, 2),  # as Qwen3-4B, whose head is tied
    "7B": Size(4096, 32, 32, 50304, 1024, 2),
}


class Variant(NamedTuple):
    """What is done to each layer.

    Attributes:
        mixed: parameters in fp32, computed with in bf16; otherwise all is bf16.
        nbytes: for each parameter, that have to fit: of mixed ones fp32 shards, gathered in bf16.
        by: which ways are compared; all by default.
    """

    checkpointed: bool = False
    compiled: bool = False
    mixed: bool = False
    nbytes: int = 14
    by: tuple[str, ...] = ()


VARIANTS = {
    "plain": Variant(),
    "checkpointed": Variant(checkpointed=True),
    "compiled": Variant(compiled=True),
    "both": Variant(checkpointed=True, compiled=True),
    "mixed": Variant(mixed=True, nbytes=24),
    # all layers, whether or not they fit without
    "offload": Variant(True, mixed=True, nbytes=2, by=("fully_shard", "masters", "masters_early")),
}

BARE = "bare"
WAYS = {
    BARE: "no wrapper",
    "ddp_view": "torch DDP",
    "shardkit": "shardkit OSS + ShardedDDP",
    "fsdp": "shardkit FSDP",
    "fully_shard": "shardkit fully_shard",
    "masters": "shardkit fully_shard, masters on the host",
    "masters_early": "the same, stepped in backward",
    "torch_fsdp1": "torch FSDP1",
    "torch_fsdp2": "torch FSDP2",
    "fairscale_fsdp": "fairscale FSDP",
}
_MIXED: dict[str, Callable[..., Trainer]] = {
    "fsdp": implementations.fsdp,
    "fully_shard": implementations.fully_shard,
    **dict.fromkeys(
        ("masters", "masters_early"),
        lambda model, compute: implementations.fully_shard(
            model, compute, offload=OffloadPolicy(masters=True)
        ),
    ),
    "torch_fsdp1": implementations.torch_fsdp1,
    "torch_fsdp2": implementations.torch_fsdp2,
    "fairscale_fsdp": lambda model, compute: implementations.fsdp(
        model, library="fairscale", compute=compute
    ),
}


def ways(variant: Variant, device: str) -> list[str]:
    """What can train so there; fairscale's FSDP insists on CUDA, and takes no parameters in bf16."""
    names = variant.by or [
        way for way in WAYS if way in (BARE, *(_MIXED if variant.mixed else IMPLEMENTATIONS))
    ]
    return [n for n in names if (device == "cuda" and variant.mixed) or not n.startswith("fairscale")]


class _Layer(Block):
    """A layer that may be checkpointed and compiled. Wrappers are around it, and see neither."""

    checkpointed = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.body: Callable[[torch.Tensor], torch.Tensor] = super().forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)


def build(size: Size, depth: int, variant: Variant, device: torch.device) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    dtype = torch.float32 if variant.mixed else torch.bfloat16
    with torch.device(device):
        model = GPT(size.vocabulary, size.tokens, size.width, depth, size.heads, block=_Layer)
    model = model.to(dtype)
    for layer in model.blocks:
        assert isinstance(layer, _Layer)
        layer.checkpointed = variant.checkpointed
        if variant.compiled:  # "eager" only tries this program
            layer.body = torch.compile(layer.body, backend="inductor" if device.type == "cuda" else "eager")
    return model


def train(way: str, model: nn.Module, variant: Variant) -> Trainer:
    """Wrapped, with its optimizer."""
    if not variant.mixed:
        return IMPLEMENTATIONS[way](model)
    if way == BARE:
        return implementations.bare(model)
    return _MIXED[way](model, compute=torch.bfloat16)


def batch(size: Size, number: int, rank: int, device: torch.device) -> torch.Tensor:
    """[batch, tokens + 1]"""
    generator = torch.Generator(device).manual_seed(131 * number + rank)
    shape = (size.batch, size.tokens + 1)
    return torch.randint(0, size.vocabulary, shape, device=device, generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor, bare_mixed: bool) -> torch.Tensor:
    """``bare_mixed``: the model without a wrapper has nothing that computes in bf16 for it."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bare_mixed):
        logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
