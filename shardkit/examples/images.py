"""Images for the training scripts: those in a folder, scikit-learn's digits in any size, and random ones."""

from __future__ import annotations

import functools
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

from .data import image_folders, mnist_files
from .data.sets import Data, Images, Sample
from .handwritten import Split, load

FAKE_TRAIN, FAKE_HELD_OUT = 256, 64
DIGITS = 10
FOLDER_WORKERS = 4


class Source(NamedTuple):
    """Attributes: loads the data; how many classes there are; how many processes load images by default."""

    load: Callable[[], Data]
    classes: int
    workers: int = 0


def real(size: int, channels: int) -> Data:
    """The digits, [n, channels, size, size]: training and held-out ones."""
    train, held_out = (
        _images(F.interpolate(part.images, size=size, mode="bilinear").repeat(1, channels, 1, 1), part.labels)
        for part in load()
    )
    return Data(train, held_out, DIGITS)


class FakeImages(Dataset[Sample]):
    """Noise with random labels, the same in every process; made when it is asked for.

    Args:
        count: of images.
        shape: of one.
        classes: that labels are of.
        seed: other images have another one.
    """

    def __init__(self, count: int, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self._count, self._shape, self._classes, self._seed = count, shape, classes, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(1_000_000_007 * self._seed + index)
        image = torch.randn(self._shape, generator=generator)
        return image, torch.randint(self._classes, (), generator=generator)


def fake(size: int, channels: int, classes: int, batch: int = 1) -> Data:
    """Random images and labels: a batch at least."""
    shape = (channels, size, size)
    train = FakeImages(max(FAKE_TRAIN, batch), shape, classes, seed=0)
    return Data(train, FakeImages(FAKE_HELD_OUT, shape, classes, seed=1), classes)


def _images(images: torch.Tensor, labels: torch.Tensor) -> Images:
    return TensorDataset(*Split(images, labels))  # type: ignore[return-value]


# ------------------------------------------------------------ what a command line asks for
def default_folder(name: str) -> Path:
    """Where torch_xla's examples look for data (/tmp, or TMPDIR)."""
    return Path(tempfile.gettempdir()) / name


def of_mnist(options: Namespace) -> Source:
    """MNIST's files in ``--datadir`` or in /tmp/mnist-data; digits where there are none, and it says so.

    Raises:
        ConfigurationError: ``--datadir`` doesn't have them.
    """
    size, classes = mnist_files.SIZE, mnist_files.CLASSES
    if options.fake_data:
        return Source(functools.partial(fake, size, 1, classes, options.batch_size * options.ranks), classes)
    usual = default_folder("mnist-data")
    folder = options.datadir or (usual if mnist_files.is_there(usual) else None)
    if folder is None:
        _say_digits(f"no MNIST in {usual}")
        return Source(functools.partial(real, size, 1), DIGITS)
    mnist_files.find(folder)
    return Source(functools.partial(mnist_files.load, folder), classes)


def of_folders(options: Namespace, folder: str | None, size: int, fake_classes: int) -> Source:
    """Folders of images in ``--datadir`` or in /tmp/imagenet; digits in colour where there are none, and it says so.

    Args:
        options: the command line.
        folder: what it names.
        size: pixels that the network takes.
        fake_classes: of ``--fake_data``.

    Raises:
        ConfigurationError: the folder that is named doesn't have them.
    """
    if options.fake_data:
        batch = options.batch_size * options.ranks
        return Source(functools.partial(fake, size, 3, fake_classes, batch), fake_classes)
    usual = default_folder("imagenet")
    folder = folder or (str(usual) if usual.is_dir() else None)
    if folder is None:
        _say_digits(f"no {usual}")
        return Source(functools.partial(real, size, 3), DIGITS)
    classes = image_folders.classes_in(folder)
    return Source(functools.partial(image_folders.load, folder, size), len(classes), FOLDER_WORKERS)


def _say_digits(why: str) -> None:
    print(f"{why}, and no --datadir: these are scikit-learn's handwritten digits", flush=True)
