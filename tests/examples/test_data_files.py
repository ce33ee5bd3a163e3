"""MNIST's files and folders of images: what is read, and what every rank says where they are missing or damaged."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

import images
from images import SharedEvenly, load_everywhere
from shardkit.errors import ConfigurationError, DamagedFileError
from tests.examples import tiny_data
from tests.pools import rank_pool


@pytest.mark.parametrize(("inside", "zipped"), [("", True), ("MNIST/raw", False), ("0/MNIST/raw", True)])
def test_mnist_files_are_read(inside: str, zipped: bool, tmp_path: Path) -> None:
    tiny_data.mnist(tmp_path / inside, zipped=zipped)
    if not zipped:  # as some programs name what they unpack
        name = tmp_path / inside / "train-images-idx3-ubyte"
        name.rename(name.with_name("train-images.idx3-ubyte"))
    data = images.load_mnist(tmp_path)
    assert (len(data.train), len(data.held_out), data.classes) == (64, 20, 10)
    image, label = data.train[13]
    assert (image.shape, image.dtype, label.item()) == ((1, 28, 28), torch.float32, 3)
    torch.testing.assert_close(image[0, 8], torch.full((28,), (1 - 0.1307) / 0.3081))
    assert image[0, 9].max() < 0.2
    (several,) = data.train.__getitems__([13])
    assert torch.equal(several[0], image)


def test_real_idx_header_of_the_published_files() -> None:
    """The first bytes of train-images-idx3-ubyte, as published: 60,000 images of 28 x 28."""
    assert tiny_data.idx(torch.empty(60000, 28, 28))[:16].hex() == "000008030000ea600000001c0000001c"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda p: p.unlink(), ConfigurationError, "has no t10k-images-idx3-ubyte. MNIST is the four files"),
        (_cut, DamagedFileError, "should have 15680 bytes for its 20 x 28 x 28 elements, it has 15679"),
        (lambda p: p.write_bytes(b""), DamagedFileError, "begins with nothing in place of 00 00 08 03"),
        (lambda p: p.write_bytes(p.read_bytes()[:9]), DamagedFileError, "no idx file"),
        (
            lambda p: p.write_bytes(tiny_data.idx(torch.zeros(3, 28, 28))),
            DamagedFileError,
            "3 images and .* 20 labels",
        ),
        (lambda p: p.write_bytes(tiny_data.idx(torch.zeros(20, 8, 8))), ConfigurationError, "8 x 8 pixels"),
        (lambda p: p.rename(f"{p}.gz"), DamagedFileError, "can't be unpacked"),
    ],
)
def test_bad_mnist_files_are_named(damage, error: type[Exception], says: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tiny_data.mnist(tmp_path, zipped=False)
    damage(tmp_path / "t10k-images-idx3-ubyte")
    with pytest.raises(error, match=says):
        images.load_mnist(tmp_path)


def test_folders_of_images_are_read(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="images are read with pillow (extra: demo)")
    data = images.load_folders(tiny_data.image_folders(tmp_path), 16)
    assert (len(data.train), len(data.held_out), data.classes) == (24, 10, 2)
    for part in (data.train, data.held_out):
        for number in range(len(part)):
            image, label = part[number]
            assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
            assert label == number // (len(part) // 2)  # in the order of the classes' names
            assert (image.mean() > 0) == bool(label)
    first, again = data.held_out[0][0], data.held_out[0][0]
    assert torch.equal(first, again)
    torch.testing.assert_close(
        first[:, 0, 0], (30 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    )


def test_parts_of_training_images_are_within_them() -> None:
    torch.manual_seed(0)
    boxes = [images.random_box(40, 30) for _ in range(200)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 30
        assert 0.08 * 0.9 <= (right - left) * (bottom - top) / 1200 <= 1.01
        assert 0.7 <= (right - left) / (bottom - top) <= 1.42
    assert len(set(boxes)) > 100
    assert images.random_box(1000, 3) == (498, 0, 502, 3)  # nothing fits: the middle
    assert images.middle_box(256, 512) == (16, 144, 240, 368)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (
            lambda f: shutil.rmtree(f),
            "is no folder; it should have train/ with a folder for each class and val/",
        ),
        (
            lambda f: shutil.rmtree(f / "val"),
            "has no val/ with a folder for each class. Images are expected as train/",
        ),
        (
            lambda f: shutil.rmtree(f / "val" / "n01440764"),
            "different classes: n01440764 is in one of them only",
        ),
        (lambda f: [p.unlink() for p in (f / "train" / "n01443537").iterdir()], "n01443537 has no image"),
    ],
)
def test_bad_folders_are_named(break_it, says: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("PIL", reason="images are read with pillow (extra: demo)")
    folder = tiny_data.image_folders(tmp_path / "images", 1, 1)
    break_it(folder)
    with pytest.raises(ConfigurationError, match=says):
        images.load_folders(folder, 8)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="images are read with pillow (extra: demo)")
    folder = tiny_data.image_folders(tmp_path, 1, 1)
    path = folder / "train" / "n01440764" / "train_0.JPEG"
    for content in (path.read_bytes()[:200], b"nothing", b""):
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"train_0\.JPEG can't be read as an image"):
            images.load_folders(folder, 8).train[0]


def _loaded(rank: int, folders: list[str]) -> str:
    from shardkit.backend import get_backend

    try:
        data = load_everywhere(
            functools.partial(images.load_mnist, folders[rank]), get_backend("gloo").group()
        )
    except ConfigurationError as error:
        return str(error)
    return str(len(SharedEvenly(data.train, 3)))


def test_every_rank_says_what_one_misses(tmp_path: Path) -> None:
    whole = str(tiny_data.mnist(tmp_path / "whole"))
    smaller, none = str(tiny_data.mnist(tmp_path / "smaller", train=10)), str(tmp_path / "none")
    ranks = rank_pool(2)
    assert ranks.run(_loaded, [whole, whole]) == ["66", "66"]  # the next multiple of 3
    for said in ranks.run(_loaded, [whole, none]):
        assert "rank 1 has no data: ConfigurationError" in said
        assert "train-images-idx3-ubyte" in said
        assert "is no folder" in said
    first, second = ranks.run(_loaded, [whole, smaller])
    assert first == second
    assert "rank 0: 64 + 20 images of 10 classes; rank 1: 10 + 20 images" in first
