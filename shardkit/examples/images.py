"""Images for the training scripts: scikit-learn's handwritten digits in any size, and random ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardkit.examples.handwritten import Split, load

FAKE_TRAIN, FAKE_HELD_OUT = 256, 64


def real(size: int, channels: int) -> tuple[Split, Split]:
    """The digits, [n, channels, size, size]: training and held-out ones."""
    return tuple(  # type: ignore[return-value]
        Split(F.interpolate(part.images, size=size, mode="bilinear").repeat(1, channels, 1, 1), part.labels)
        for part in load()
    )


def fake(size: int, channels: int, classes: int) -> tuple[Split, Split]:
    """Noise with random labels, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        Split(
            torch.randn(count, channels, size, size, generator=generator),
            torch.randint(classes, (count,), generator=generator),
        )
        for count in (FAKE_TRAIN, FAKE_HELD_OUT)
    )
