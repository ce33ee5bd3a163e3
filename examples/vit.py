"""A vision transformer of any size: trained if it is small, planned if it is one of 10 billion parameters.

python examples/vit.py --plan --ranks 128
python examples/vit.py --use_nested_fsdp --embed_dim 64 --num_heads 4 --num_blocks 2
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import images
import training
from digits import Block
from shardkit import wrap
from shardkit.tools.estimate import Subject, as_text, estimate

FLAGS = ("embed_dim", "num_heads", "num_blocks", "image_size", "patch_size", "classes")


class Config(NamedTuple):
    """The defaults are those of the 10-billion example.

    Attributes:
        embed_dim, num_heads, num_blocks: of the transformer.
        image_size, patch_size: pixels; patches don't overlap.
        classes: how many images may be of.
        mlp_ratio: how many times as wide the MLPs are inside.
        pos_dropout, att_dropout, mlp_dropout: share that is dropped of what comes in, of attention, of what MLPs give.
    """

    embed_dim: int = 5120
    num_heads: int = 32
    num_blocks: int = 32
    image_size: int = 224
    patch_size: int = 14
    classes: int = 1000
    mlp_ratio: float = 4.0
    pos_dropout: float = 0.0
    att_dropout: float = 0.0
    mlp_dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


def block(config: Config) -> Block:
    """One of them."""
    return Block(
        config.embed_dim,
        config.num_heads,
        qkv_bias=True,
        mlp_ratio=config.mlp_ratio,
        att_dropout=config.att_dropout,
        mlp_dropout=config.mlp_dropout,
    )


class VisionTransformer(nn.Module):
    """Images [batch, 3, size, size] to logits [batch, classes]; each block is a unit (arXiv 2010.11929)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.embed_dim
        self.patches = nn.Conv2d(3, dim, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(torch.randn(1, config.tokens, dim) * 0.02)
        self.dropout = config.pos_dropout
        # A block is sharded before the next one is made: no rank ever holds the whole model.
        self.blocks = nn.Sequential(*(wrap(block(config)) for _ in range(config.num_blocks)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, config.classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        x = F.dropout(x, self.dropout, self.training)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


def task(config: Config, source: images.Source) -> training.Task:
    """What is trained; the data say how many classes there are."""
    return training.Task(
        "vit",
        functools.partial(VisionTransformer, config._replace(classes=source.classes)),
        source.load,
        units=(Block,),
        optimizer=torch.optim.AdamW,
        settings={"weight_decay": 0.1},
        workers=source.workers,
    )


def plan(config: Config, ranks: int, batch: int, dtype: torch.dtype) -> str:
    """What the training takes of each rank, as ``shardkit estimate`` says it; each block is a unit."""

    def units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
        for name, child in model.get_submodule("blocks").named_children():
            setattr(model.blocks, name, unit(child))

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        pixels = torch.empty(batch, 3, config.image_size, config.image_size, device="meta")
        result: torch.Tensor = model(pixels).float().mean()
        return result

    build = functools.partial(VisionTransformer, config)
    subject = Subject("vit", build, loss, (torch.optim.AdamW, {"lr": 1e-3}), units, dtype)
    return as_text(subject, [estimate(subject, "fsdp", ranks, batch)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    description = "Trains a vision transformer, or says what memory the training of one takes (--plan)."
    parser = training.make_parser("vit", description, lr=1e-3, auto_wrap_min_num_params=10_000)
    parser.add_argument("--plan", action="store_true", help="train nothing, print what a rank needs")
    for name in FLAGS:
        parser.add_argument(
            f"--{name}", type=int, default=getattr(Config(), name), help="default: %(default)s"
        )
    options = training.parse(parser, argv)
    if min(getattr(options, name) for name in FLAGS) < 1 or options.embed_dim % options.num_heads:
        parser.error(
            f"{', '.join(f'--{name}' for name in FLAGS)} are at least 1, and heads divide --embed_dim"
        )
    config = Config(**{name: getattr(options, name) for name in FLAGS})
    if options.plan:
        print(plan(config, options.ranks, options.batch_size, training.DTYPES[options.compute_dtype]))
        return 0

    def make_task() -> training.Task:
        source = images.of_folders(options, options.datadir, config.image_size, config.classes)
        return task(config, source)

    return training.run(make_task, options)


if __name__ == "__main__":
    sys.exit(main())
