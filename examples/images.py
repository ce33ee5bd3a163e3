"""Images for the training scripts: MNIST's files, folders of images as ImageNet's, enlarged digits, random ones.

MNIST's four files have the format "idx", as it is or compressed by gzip (yann.lecun.com/exdb/mnist): two zero bytes,
the type of the elements (8: bytes), the number of dimensions; then their sizes, in four bytes each, the highest first;
then the elements, the last dimension fastest.

Images of folders (``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``) are read with pillow. Training images are cut out at
random and mirrored, test images are cut from the middle, as torchvision's ``RandomResizedCrop``,
``RandomHorizontalFlip``, ``Resize`` and ``CenterCrop`` do. Random numbers are torch's.
"""

from __future__ import annotations

import functools
import gzip
import math
import os
import tempfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

import digits
from shardkit.backend import Group
from shardkit.checks import all_gather_facts
from shardkit.errors import ConfigurationError, DamagedFileError, ShardkitError

if TYPE_CHECKING:
    from PIL.Image import Image

DIGITS = 10
Sample = tuple[torch.Tensor, torch.Tensor]


class Images(Protocol):
    """A dataset: images [channels, height, width], fp32, with their labels [], int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Data(NamedTuple):
    """Attributes: images to train on; images to test on; how many classes they are of."""

    train: Images
    held_out: Images
    classes: int


class SharedEvenly(Dataset[Sample]):
    """A dataset whose first samples come once more at its end, so that every rank gets as many as any other.

    That is what ``DistributedSampler`` does, too. With ``drop_last`` it isn't needed.

    Args:
        images: the dataset, of N samples; this one has the next multiple of ``ranks``.
    """

    def __init__(self, images: Images, ranks: int) -> None:
        self._images, self._length = images, -(-len(images) // ranks) * ranks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._images[index % len(self._images)]


def load_everywhere(load: Callable[[], Data], group: Group) -> Data:
    """``load()`` on every rank (collective): all of them get the same number of images, or all raise.

    Raises:
        ConfigurationError: a rank has no data, with what it misses; or ranks have found different data.
    """
    data: Data | None = None
    facts = ("", 0, 0, 0)
    try:
        data = load()
        facts = ("", len(data.train), len(data.held_out), data.classes)
    except (ShardkitError, OSError) as error:
        facts = (f"{type(error).__name__}: {error}", 0, 0, 0)
    everybody = all_gather_facts(group, facts, label="data of all ranks")
    for rank, (problem, *_) in enumerate(everybody):
        if problem:
            raise ConfigurationError(f"rank {rank} has no data: {problem}")
    if len(set(everybody)) > 1:
        found = "; ".join(
            f"rank {r}: {a} + {b} images of {c} classes" for r, (_, a, b, c) in enumerate(everybody)
        )
        raise ConfigurationError(
            f"ranks have found different data ({found}); give all of them the same files"
        )
    return cast(Data, data)


# ------------------------------------------------------------ MNIST
MNIST_SIZE = 28
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# The folder itself, and where torchvision puts them; torch_xla's scripts let each rank download its own.
MNIST_FOLDERS = ("", "MNIST/raw", "raw", "0/MNIST/raw")


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
        images = (self._images[indices].float() / 255 - 0.1307) / 0.3081
        return list(zip(images.unsqueeze(1), self._labels[indices], strict=True))


def load_mnist(folder: str | Path) -> Data:
    """The training and the test images in a folder.

    Raises:
        ConfigurationError: files are missing, or pillars of MNIST differ (28 x 28 pixels, labels 0 to 9).
        DamagedFileError: a file is cut off, or is none of this format.
    """
    paths = find_mnist(folder)
    train, held_out = (_pair(*paths[start : start + 2]) for start in (0, 2))
    return Data(train, held_out, DIGITS)


def has_mnist(folder: str | Path) -> bool:
    """Whether there is one of the files at least."""
    return any(_path(Path(folder) / inside, name) for inside in MNIST_FOLDERS for name in MNIST_FILES)


def find_mnist(folder: str | Path) -> list[Path]:
    """Paths of the four files.

    Raises:
        ConfigurationError: some are missing; says which, and where they have been looked for.
    """
    best: list[Path | None] = [None] * len(MNIST_FILES)
    for inside in MNIST_FOLDERS:
        found = [_path(Path(folder) / inside, name) for name in MNIST_FILES]
        if sum(p is not None for p in found) > sum(p is not None for p in best):
            best = found
    paths = [path for path in best if path is not None]
    if len(paths) == len(MNIST_FILES):
        return paths
    missing = [name for name, path in zip(MNIST_FILES, best, strict=True) if path is None]
    is_folder = Path(folder).is_dir()
    raise ConfigurationError(
        f"{folder} {'has' if is_folder else 'is no folder; it should have'} "
        f"{'no ' if is_folder else ''}{', '.join(missing)}. MNIST is the four files "
        f"{', '.join(MNIST_FILES)}, each as it is or with .gz, in the folder itself or in "
        f"{', '.join(MNIST_FOLDERS[1:])} below it; --datadir says which folder"
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
    if pixels.shape[1:] != (MNIST_SIZE, MNIST_SIZE) or int(digits.max()) >= DIGITS:
        raise ConfigurationError(
            f"{images} holds images of {pixels.shape[1]} x {pixels.shape[2]} pixels with labels up to "
            f"{int(digits.max())}; this network is for MNIST's {MNIST_SIZE} x {MNIST_SIZE} and labels 0 to {DIGITS - 1}"
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
    if data[:4] != bytes([0, 0, 8, dims]) or len(data) < begin:
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


# ------------------------------------------------------------ folders of images
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


def load_folders(folder: str | Path, size: int) -> Data:
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


# ------------------------------------------------------------ what a command line asks for
FAKE_TRAIN, FAKE_HELD_OUT = 256, 64
FOLDER_WORKERS = 4


class Source(NamedTuple):
    """Attributes: loads the data; how many classes there are; how many processes load images by default."""

    load: Callable[[], Data]
    classes: int
    workers: int = 0


def real(size: int, channels: int) -> Data:
    """The digits, [n, channels, size, size]: training and held-out ones."""
    train, held_out = (
        TensorDataset(
            F.interpolate(part.images, size=size, mode="bilinear").repeat(1, channels, 1, 1), part.labels
        )
        for part in digits.load()
    )
    return Data(cast(Images, train), cast(Images, held_out), DIGITS)


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


def default_folder(name: str) -> Path:
    """Where torch_xla's examples look for data (/tmp, or TMPDIR)."""
    return Path(tempfile.gettempdir()) / name


def of_mnist(options: Namespace) -> Source:
    """MNIST's files in ``--datadir`` or in /tmp/mnist-data; digits where there are none, and it says so.

    Raises:
        ConfigurationError: ``--datadir`` doesn't have them.
    """
    size, classes = MNIST_SIZE, DIGITS
    if options.fake_data:
        return Source(functools.partial(fake, size, 1, classes, options.batch_size * options.ranks), classes)
    usual = default_folder("mnist-data")
    folder = options.datadir or (usual if has_mnist(usual) else None)
    if folder is None:
        _say_digits(f"no MNIST in {usual}")
        return Source(functools.partial(real, size, 1), DIGITS)
    find_mnist(folder)
    return Source(functools.partial(load_mnist, folder), classes)


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
    classes = classes_in(folder)
    return Source(functools.partial(load_folders, folder, size), len(classes), FOLDER_WORKERS)


def _say_digits(why: str) -> None:
    print(f"{why}, and no --datadir: these are scikit-learn's handwritten digits", flush=True)
