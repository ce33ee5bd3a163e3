"""Residual networks (arXiv 1512.03385); bottlenecks stride in their 3 x 3 convolution, as torchvision's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shardkit import wrap


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

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits
