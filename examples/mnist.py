"""MNIST's convolutional network: on its four files, or on scikit-learn's handwritten digits, enlarged to 28 x 28.

python examples/mnist.py --use_nested_fsdp --use_gradient_checkpointing
python examples/mnist.py --datadir FOLDER --drop_last --strategy sharded_ddp
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import images
import training
from shardkit import wrap
from shardkit.types import Tree


class MnistNet(nn.Module):
    """Images [batch, 1, 28, 28] to logits [batch, 10]; the network of torch_xla's example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = wrap(nn.Conv2d(1, 10, kernel_size=5))
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = wrap(nn.Conv2d(10, 20, kernel_size=5))
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = wrap(nn.Linear(320, 50))
        self.fc2 = wrap(nn.Linear(50, images.DIGITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


def task(source: images.Source) -> training.Task:
    """What is trained."""
    return training.Task(
        "mnist",
        MnistNet,
        source.load,
        units=(nn.Conv2d, nn.Linear),
        optimizer=torch.optim.SGD,
        settings={},
        workers=source.workers,
    )


def parser(name: str = "mnist", **defaults: Tree) -> argparse.ArgumentParser:
    """The command line."""
    description = "Trains MNIST's convolutional network, on MNIST or on scikit-learn's handwritten digits."
    return training.make_parser(name, description, **{"lr": 0.05, "momentum": 0.9, **defaults})


def guide(strategy: str) -> Tree:
    """Defaults of PyTorch/XLA's guides; a strategy is "native" or "xla_fsdp"."""
    return {**training.guide_defaults(strategy), "lr": 0.01, "momentum": 0.5, "lr_scheduler_type": "none"}


def run(options: Namespace) -> int:
    """Trains; the exit code."""
    return training.run(lambda: task(images.of_mnist(options)), options)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run(training.parse(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
