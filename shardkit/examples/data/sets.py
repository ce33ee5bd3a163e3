"""What a script trains and tests on, and the check that all ranks have found the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch.utils.data import Dataset

from shardkit.backend import Group
from shardkit.checks.facts import all_gather_facts
from shardkit.errors import ConfigurationError, ShardkitError

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
