"""A residual network on images of ImageNet's form: folders of them, random ones, or handwritten digits in colour.

python -m shardkit.examples.imagenet --datadir FOLDER --model resnet50 --use_nested_fsdp --batch_size 128 --drop_last
python -m shardkit.examples.imagenet --fake_data --model resnet50 --use_nested_fsdp --num_epochs 1
"""

from __future__ import annotations

import argparse
import functools
import sys
from argparse import Namespace
from collections.abc import Sequence

import torch

from ..types import Tree
from . import flags, images, training
from .resnet import CONFIGS, BasicBlock, Bottleneck, ResNet

FAKE_CLASSES = 1000


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
    made = flags.make_parser(name, description, **{**own, **defaults})
    made.add_argument("--model", choices=tuple(CONFIGS), help="default: %(default)s")
    made.add_argument("--image_size", type=int, help="default: 32 for tiny, 224 for the others")
    return made


def run(options: Namespace) -> int:
    """Trains; the exit code."""
    size = CONFIGS[options.model].size if options.image_size is None else options.image_size

    def make_task() -> training.Task:
        return task(images.of_folders(options, options.datadir, size, FAKE_CLASSES), options.model)

    return training.run(make_task, options)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run(flags.parse(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
