"""Folders of images as ImageNet's: ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``, read with pillow.

Training images are cut out at random and mirrored, test images are cut from the middle, as torchvision's
``RandomResizedCrop``, ``RandomHorizontalFlip``, ``Resize`` and ``CenterCrop`` do. Random numbers are torch's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from shardkit.errors import ConfigurationError, DamagedFileError

from .sets import Data, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("train", "val")
SUFFIXES = (".jpeg", ".jpg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHARES, ASPECTS, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# A test image's shorter side is made so much longer than what is cut from its middle: 256 for 224.
MARGIN = 256 / 224
Box = tuple[float, float, float, float]


class FolderImages(Dataset[Sample]):
    """Images of one part; samples are [3, size, size].

    Args:
        folder: of this part, with a folder for each class.
        classes: names of those, in the order of their labels.
        is_cut_at_random: for training.

    Raises:
        ConfigurationError: a class has no image.
    """

    def __init__(self, folder: Path, classes: Sequence[str], size: int, is_cut_at_random: bool) -> None:
        self._size, self._is_cut_at_random = size, is_cut_at_random
        self._folder, self._files = folder, list[tuple[str, int]]()
        for label, name in enumerate(classes):
            with os.scandir(folder / name) as entries:
                files = sorted(e.name for e in entries if e.name.lower().endswith(SUFFIXES))
            if not files:
                raise ConfigurationError(
                    f"{folder / name} has no image ({', '.join(SUFFIXES)}); add some, or remove the folder"
                )
            self._files += ((f"{name}/{file}", label) for file in files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        file, label = self._files[index]
        path = self._folder / file
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (
            UnidentifiedImageError,
            OSError,
            SyntaxError,
        ) as error:  # the last is how pillow names a bad PNG
            raise DamagedFileError(f"{path} can't be read as an image: {error}") from error
        return self._cut(image), torch.tensor(label)

    def _cut(self, image: Image) -> torch.Tensor:
        from PIL import Image as pillow

        size = (self._size, self._size)
        box = random_box(*image.size) if self._is_cut_at_random else middle_box(*image.size)
        image = image.resize(size, pillow.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*size, 3)
        found = (pixels.permute(2, 0, 1).float() / 255 - _column(MEAN)) / _column(DEVIATION)
        return found.flip(2) if self._is_cut_at_random and torch.rand(()) < 0.5 else found


def _column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values).view(3, 1, 1)


def random_box(width: int, height: int) -> Box:
    """Left, top, right and bottom of a part with 8 to 100 % of the area and an aspect of 3 to 4 until 4 to 3."""
    for _ in range(TRIES):
        share = torch.empty(()).uniform_(*SHARES).item()
        aspect = math.exp(torch.empty(()).uniform_(*(math.log(a) for a in ASPECTS)).item())
        wide = round(math.sqrt(width * height * share * aspect))
        high = round(math.sqrt(width * height * share / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left = int(torch.randint(width - wide + 1, ()))
            top = int(torch.randint(height - high + 1, ()))
            return left, top, left + wide, top + high
    wide = min(width, round(height * ASPECTS[1]))  # a long narrow image: its middle, as far as aspects allow
    high = min(height, round(width / ASPECTS[0]))
    return _middle(width, height, wide, high)


def middle_box(width: int, height: int) -> Box:
    """The square in the middle that is left where a margin is taken off the shorter side."""
    side = min(width, height) / MARGIN
    return _middle(width, height, side, side)


def _middle(width: int, height: int, wide: float, high: float) -> Box:
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def classes_in(folder: str | Path) -> list[str]:
    """Names of the classes, sorted; looks at no image.

    Raises:
        ConfigurationError: these are not such folders; the classes of both parts differ; pillow is missing.
    """
    named = [(part, _folders(Path(folder) / part)) for part in PARTS]
    missing = [part for part, found in named if not found]
    if missing:
        state = "has no" if Path(folder).is_dir() else "is no folder; it should have"
        raise ConfigurationError(
            f"{folder} {state} {' and '.join(f'{part}/ with a folder for each class' for part in missing)}. "
            f"Images are expected as train/CLASS/NAME.JPEG and val/CLASS/NAME.JPEG ({', '.join(SUFFIXES)}); --datadir "
            "(--data_dir) says which folder that is in"
        )
    (_, train), (_, held_out) = named
    if train != held_out:
        odd = sorted(set(train) ^ set(held_out))
        raise ConfigurationError(
            f"train/ and val/ in {folder} have different classes: {', '.join(odd[:5])}{', ...' if odd[5:] else ''} "
            f"{'are' if odd[1:] else 'is'} in one of them only. ImageNet's val images have to be sorted into folders "
            "of their classes first"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("reading images needs pillow: pip install pillow") from error
    return train


def load(folder: str | Path, size: int) -> Data:
    """Training and test images, ``size`` pixels wide and high.

    Raises:
        ConfigurationError: see :func:`classes_in`; a class has no image.
    """
    classes = classes_in(folder)
    train, held_out = (FolderImages(Path(folder) / part, classes, size, part == "train") for part in PARTS)
    return Data(train, held_out, len(classes))


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
