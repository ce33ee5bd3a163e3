"""Tiny data in the real formats."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch

CLASSES = ("n01440764", "n01443537")


def idx(values: torch.Tensor) -> bytes:
    """Bytes of any shape as an idx file."""
    head = bytes([0, 0, 8, values.dim()]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.to(torch.uint8).numpy().tobytes()


def mnist(folder: Path, train: int = 64, test: int = 20, zipped: bool = True) -> Path:
    """The four files; an image of digit d is white in row 2 d, and a little noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = torch.arange(count) % 10
        images = torch.randint(40, (count, 28, 28), generator=generator)
        images[torch.arange(count), 2 * labels + 2] = 255
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            data = idx(values)
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
    return folder


def image_folders(folder: Path, train: int = 12, val: int = 5) -> Path:
    """A dark and a light class; colour, grey and palette, JPEG and PNG, upright and lying, beside other files."""
    from PIL import Image

    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            inside = folder / part / name
            inside.mkdir(parents=True)
            (inside / "readme.txt").write_text("not an image")
            for number in range(count):
                mode = ("RGB", "L", "P")[number % 3]
                size = (40 + number, 30) if number % 2 else (33, 47)
                image = Image.new("L", size, 30 + 180 * label + number % 5).convert(mode)
                suffix = "png" if mode == "P" else "JPEG"
                image.save(inside / f"{part}_{number}.{suffix}", "PNG" if mode == "P" else "JPEG")
    return folder
