"""MNIST's convolutional network on real handwritten digits (scikit-learn's, enlarged to MNIST's 28 x 28).

python -m shardkit.examples.mnist --use_nested_fsdp --use_gradient_checkpointing
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from shardkit import wrap

from . import images, training

SIZE, CLASSES = 28, 10


class MnistNet(nn.Module):
    """Images [batch, 1, 28, 28] to logits [batch, 10]; the network of torch_xla's example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = wrap(nn.Conv2d(1, 10, kernel_size=5))
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = wrap(nn.Conv2d(10, 20, kernel_size=5))
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = wrap(nn.Linear(320, 50))
        self.fc2 = wrap(nn.Linear(50, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


def task(fake_data: bool = False) -> training.Task:
    """What is trained."""
    return training.Task(
        "mnist",
        MnistNet,
        functools.partial(images.fake, SIZE, 1, CLASSES)
        if fake_data
        else functools.partial(images.real, SIZE, 1),
        units=(nn.Conv2d, nn.Linear),
        optimizer=torch.optim.SGD,
        settings={"momentum": 0.9},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    description = "Trains MNIST's convolutional network on scikit-learn's handwritten digits."
    options = training.parse(training.make_parser("mnist", description, lr=0.05), argv)
    return training.run(task(options.fake_data), options)


if __name__ == "__main__":
    sys.exit(main())
