"""A residual network on images of ImageNet's form: random ones, or handwritten digits as colour images.

python -m shardkit.examples.imagenet --fake_data --model resnet50 --use_nested_fsdp --num_epochs 1
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from . import images, training
from .resnet import CONFIGS, BasicBlock, Bottleneck, ResNet

FAKE_CLASSES, REAL_CLASSES = 1000, 10


def task(model: str = "tiny", fake_data: bool = False, size: int | None = None) -> training.Task:
    """What is trained.

    Args:
        model: name of a network.
        size: height and width of images; default that which the network is meant for.
    """
    config = CONFIGS[model]
    size = config.size if size is None else size
    classes = FAKE_CLASSES if fake_data else REAL_CLASSES
    return training.Task(
        "imagenet",
        functools.partial(ResNet, config, classes),
        functools.partial(images.fake, size, 3, classes)
        if fake_data
        else functools.partial(images.real, size, 3),
        units=(BasicBlock, Bottleneck),
        optimizer=torch.optim.SGD,
        settings={"momentum": 0.9, "weight_decay": 1e-4},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    description = "Trains a residual network on digits as colour images, or on random images (--fake_data)."
    parser = training.make_parser("imagenet", description, lr=0.1, auto_wrap_min_num_params=100_000)
    parser.add_argument("--model", choices=tuple(CONFIGS), default="tiny")
    parser.add_argument("--image_size", type=int, help="default: 32 for tiny, 224 for the others")
    options = training.parse(parser, argv)
    return training.run(task(options.model, options.fake_data, options.image_size), options)


if __name__ == "__main__":
    sys.exit(main())
