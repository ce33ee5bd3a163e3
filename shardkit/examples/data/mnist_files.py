"""MNIST as its four files are: the format "idx", as it is or compressed by gzip (yann.lecun.com/exdb/mnist).

A file begins with two zero bytes, the type of its elements (8: bytes) and the number of dimensions; then their sizes,
in four bytes each, the highest first; then the elements, the last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from shardkit.errors import ConfigurationError, DamagedFileError

from .sets import Data, Sample

CLASSES, SIZE = 10, 28
PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# The folder itself, and where torchvision puts them; torch_xla's scripts let each rank download its own.
FOLDERS = ("", "MNIST/raw", "raw", "0/MNIST/raw")
MEAN, DEVIATION = 0.1307, 0.3081
BYTES = 8


class MnistImages(Dataset[Sample]):
    """Images uint8 [n, 28, 28] and labels uint8 [n]; samples are [1, 28, 28] with mean 0 and deviation 1, about."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images, self._labels = images, labels.long()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several at once: a batch costs one conversion."""
        images = (self._images[indices].float() / 255 - MEAN) / DEVIATION
        return list(zip(images.unsqueeze(1), self._labels[indices], strict=True))


def load(folder: str | Path) -> Data:
    """The training and the test images in a folder.

    Raises:
        ConfigurationError: files are missing, or pillars of MNIST differ (28 x 28 pixels, labels 0 to 9).
        DamagedFileError: a file is cut off, or is none of this format.
    """
    paths = find(folder)
    train, held_out = (_pair(*paths[start : start + 2]) for start in (0, 2))
    return Data(train, held_out, CLASSES)


def is_there(folder: str | Path) -> bool:
    """Whether there is one of the files at least."""
    return any(_path(Path(folder) / inside, name) for inside in FOLDERS for name in PARTS)


def find(folder: str | Path) -> list[Path]:
    """Paths of the four files.

    Raises:
        ConfigurationError: some are missing; says which, and where they have been looked for.
    """
    best: list[Path | None] = [None] * len(PARTS)
    for inside in FOLDERS:
        found = [_path(Path(folder) / inside, name) for name in PARTS]
        if sum(p is not None for p in found) > sum(p is not None for p in best):
            best = found
    paths = [path for path in best if path is not None]
    if len(paths) == len(PARTS):
        return paths
    missing = [name for name, path in zip(PARTS, best, strict=True) if path is None]
    is_folder = Path(folder).is_dir()
    raise ConfigurationError(
        f"{folder} {'has' if is_folder else 'is no folder; it should have'} "
        f"{'no ' if is_folder else ''}{', '.join(missing)}. MNIST is the four files {', '.join(PARTS)}, each as it is "
        f"or with .gz, in the folder itself or in {', '.join(FOLDERS[1:])} below it; --datadir says which folder"
    )


def _path(folder: Path, name: str) -> Path | None:
    """Some programs unpack to names with a dot in them."""
    for spelled in (name, name.replace("-idx", ".idx")):
        for path in (folder / spelled, folder / f"{spelled}.gz"):
            if path.is_file():
                return path
    return None


def _pair(images: Path, labels: Path) -> MnistImages:
    pixels, digits = read_idx(images, dims=3), read_idx(labels, dims=1)
    if len(pixels) != len(digits) or not len(digits):
        raise DamagedFileError(
            f"{images} has {len(pixels)} images and {labels} {len(digits)} labels; they belong to different data, or "
            "one is damaged: fetch both again"
        )
    if pixels.shape[1:] != (SIZE, SIZE) or int(digits.max()) >= CLASSES:
        raise ConfigurationError(
            f"{images} holds images of {pixels.shape[1]} x {pixels.shape[2]} pixels with labels up to "
            f"{int(digits.max())}; this network is for MNIST's {SIZE} x {SIZE} and labels 0 to {CLASSES - 1}"
        )
    return MnistImages(pixels, digits)


def read_idx(path: str | Path, dims: int) -> torch.Tensor:
    """The bytes in such a file, uint8, with as many dimensions as asked for.

    Raises:
        DamagedFileError: it is cut off, has more in it, or is none of this format.
    """
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedFileError(f"{path} can't be unpacked ({error}); fetch it again") from error
    begin = 4 + 4 * dims
    if data[:4] != bytes([0, 0, BYTES, dims]) or len(data) < begin:
        raise DamagedFileError(
            f"{path} is no idx file of bytes in {dims} dimension(s): it begins with {data[:4].hex(' ') or 'nothing'} "
            f"in place of 00 00 08 {dims:02x}"
        )
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, begin, 4)]
    if len(data) != begin + math.prod(shape):
        raise DamagedFileError(
            f"{path} should have {math.prod(shape)} bytes for its {' x '.join(map(str, shape))} elements, it has "
            f"{len(data) - begin}; fetch it again"
        )
    if not math.prod(shape):
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=begin).view(shape)
