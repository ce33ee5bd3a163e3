"""A vision transformer of any size: trained if it is small, planned if it is one of 10 billion parameters.

python -m shardkit.examples.vit --plan --ranks 128
python -m shardkit.examples.vit --use_nested_fsdp --embed_dim 64 --num_heads 4 --num_blocks 2
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardkit import wrap
from shardkit.examples.digits.model import Block

from . import images, training
from .memory_plan import plan

DIGITS = 10


class Config(NamedTuple):
    """The defaults are those of the 10-billion example.

    Attributes:
        embed_dim, num_heads, num_blocks: of the transformer; its MLPs are four times as wide.
        image_size, patch_size: pixels; patches don't overlap.
        classes: how many images may be of.
    """

    embed_dim: int = 5120
    num_heads: int = 32
    num_blocks: int = 32
    image_size: int = 224
    patch_size: int = 14
    classes: int = 1000

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class VisionTransformer(nn.Module):
    """Images [batch, 3, size, size] to logits [batch, classes]; each block is a unit (arXiv 2010.11929)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.embed_dim
        self.patches = nn.Conv2d(3, dim, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(torch.randn(1, config.tokens, dim) * 0.02)
        # A block is sharded before the next one is made: no rank ever holds the whole model.
        self.blocks = nn.Sequential(
            *(wrap(Block(dim, config.num_heads, qkv_bias=True)) for _ in range(config.num_blocks))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


def task(config: Config, fake_data: bool = False) -> training.Task:
    """What is trained."""
    return training.Task(
        "vit",
        functools.partial(VisionTransformer, config),
        functools.partial(images.fake, config.image_size, 3, config.classes)
        if fake_data
        else functools.partial(images.real, config.image_size, 3),
        units=(Block,),
        optimizer=torch.optim.AdamW,
        settings={"weight_decay": 0.1},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    description = "Trains a vision transformer, or says what memory the training of one takes (--plan)."
    parser = training.make_parser("vit", description, lr=1e-3, auto_wrap_min_num_params=10_000)
    parser.add_argument("--plan", action="store_true", help="train nothing, print what a rank needs")
    for name, value in Config()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    options = training.parse(parser, argv)
    config = Config(*(getattr(options, name) for name in Config._fields))
    if options.plan:
        dtype = training.DTYPES[options.compute_dtype]
        found = plan(
            functools.partial(VisionTransformer, config), options.ranks, dtype,
            activations=(options.batch_size * config.tokens * config.embed_dim, config.num_blocks),
        )  # fmt: skip
        print(found.report(options.batch_size))
        return 0
    if not options.fake_data:
        config = config._replace(classes=DIGITS)
    return training.run(task(config, options.fake_data), options)


if __name__ == "__main__":
    sys.exit(main())
