"""Residual networks on images of ImageNet's form: folders of them, random ones, or handwritten digits in colour.

The networks are those of arXiv 1512.03385; bottlenecks stride in their 3 x 3 convolution, as torchvision's do.

python examples/imagenet.py --datadir FOLDER --model resnet50 --use_nested_fsdp --batch_size 128 --drop_last
python examples/imagenet.py --fake_data --model resnet50 --use_nested_fsdp --num_epochs 1
"""

from __future__ import annotations

import argparse
import functools
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import images
import training
from shardkit import wrap
from shardkit.types import Tree

FAKE_CLASSES = 1000


# ------------------------------------------------------------ the networks
def convolution(channels: int, width: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size (but for its stride), and its norm."""
    return [
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
    ]


class Residual(nn.Module):
    """Adds to x what convolutions make of it: [b, channels, h, w] to [b, widths[-1], h / stride, w / stride]."""

    def __init__(self, channels: int, widths: Sequence[int], kernels: Sequence[int], stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for k, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
            layers += convolution(before, width, kernel, stride if k == kernels.index(3) else 1)
            layers.append(nn.ReLU())
            before = width
        self.inner = nn.Sequential(*layers[:-1])
        same = stride == 1 and channels == before
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(channels, before, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


class BasicBlock(Residual):
    """Two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(channels, (width, width), (3, 3), stride)


class Bottleneck(Residual):
    """A 3 x 3 convolution between two of 1 x 1, of which the last has four times as many channels."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(channels, (width, width, 4 * width), (1, 3, 1), stride)


class Config(NamedTuple):
    """Attributes: type of the blocks; how many each stage has; width of the first stage; size of images meant."""

    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, ...]
    width: int
    size: int


CONFIGS = {
    "tiny": Config(BasicBlock, (1, 1, 1), 16, 32),
    "resnet18": Config(BasicBlock, (2, 2, 2, 2), 64, 224),
    "resnet34": Config(BasicBlock, (3, 4, 6, 3), 64, 224),
    "resnet50": Config(Bottleneck, (3, 4, 6, 3), 64, 224),
    "resnet101": Config(Bottleneck, (3, 4, 23, 3), 64, 224),
}


class ResNet(nn.Module):
    """Images [batch, 3, size, size] to logits [batch, classes]; each block is a unit."""

    def __init__(self, config: Config, classes: int) -> None:
        super().__init__()
        if config.size > 32:
            stem = [*convolution(3, config.width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        else:
            stem = [*convolution(3, config.width, 3), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        channels, blocks = config.width, []
        for stage, depth in enumerate(config.depths):
            width = config.width * 2**stage
            for k in range(depth):
                blocks.append(wrap(config.block(channels, width, 2 if stage and not k else 1)))
                channels = width * config.block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(pixels)).mean(dim=(2, 3)))
        return logits


# ------------------------------------------------------------ the command


def task(source: images.Source, model: str = "tiny") -> training.Task:
    """What is trained.

    Args:
        source: images of the size that the network is meant for, or another one.
        model: name of a network.
    """
    return training.Task(
        "imagenet",
        functools.partial(ResNet, CONFIGS[model], source.classes),
        source.load,
        units=(BasicBlock, Bottleneck),
        optimizer=torch.optim.SGD,
        settings={"weight_decay": 1e-4},
        workers=source.workers,
    )


def parser(name: str = "imagenet", **defaults: Tree) -> argparse.ArgumentParser:
    """The command line."""
    description = (
        "Trains a residual network on folders of images, digits in colour, or random images (--fake_data)."
    )
    own = {"lr": 0.1, "momentum": 0.9, "auto_wrap_min_num_params": 100_000, "model": "tiny"}
    made = training.make_parser(name, description, **{**own, **defaults})
    made.add_argument("--model", choices=tuple(CONFIGS), help="default: %(default)s")
    made.add_argument("--image_size", type=int, help="default: 32 for tiny, 224 for the others")
    return made


def guide(strategy: str) -> Tree:
    """Defaults of PyTorch/XLA's guides; a strategy is "native" or "xla_fsdp"."""
    own = {"lr": 0.5, "model": "resnet50", "test_set_batch_size": 64, "auto_wrap_min_num_params": 1_000_000}
    return {**training.guide_defaults(strategy), **own, "lr_scheduler_type": training.WARMUP_AND_DECAY}


def run(options: Namespace) -> int:
    """Trains; the exit code."""
    size = CONFIGS[options.model].size if options.image_size is None else options.image_size

    def make_task() -> training.Task:
        return task(images.of_folders(options, options.datadir, size, FAKE_CLASSES), options.model)

    return training.run(make_task, options)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run(training.parse(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
