"""scikit-learn's 1,797 handwritten digits (8x8 pixels), split once, and the order in which they are seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

HELD_OUT = 360
SPLIT_SEED = 0


class Split(NamedTuple):
    """Images of shape [n, 1, 8, 8], fp32 in [-1, 1], and their digits of shape [n], int64."""

    images: torch.Tensor
    labels: torch.Tensor


def load() -> tuple[Split, Split]:
    """Training and held-out images; the held-out ones are drawn at random, always the same ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(8.0).sub(1.0).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return Split(images[train], labels[train]), Split(images[held_out], labels[held_out])


def batches(
    data: Split, epoch: int, seed: int, batch_size: int, rank: int, world_size: int
) -> Iterator[Split]:
    """This rank's rows of each global batch of one epoch.

    The order depends on seed and epoch only, so that any number of ranks sees the same global batches.
    What doesn't fill a batch is left out: all steps have one shape, which XLA compiles once.
    """
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed * 1000 + epoch))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        mine = order[start : start + batch_size][rank::world_size]
        yield Split(data.images[mine], data.labels[mine])


def steps_per_epoch(data: Split, batch_size: int) -> int:
    """How many batches :func:`batches` yields."""
    return len(data.labels) // batch_size
