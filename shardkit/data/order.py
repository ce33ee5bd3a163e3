"""Which samples are in a batch: arithmetic that knows no rank's past, so that any number of ranks can go on.

Legend: N samples, B samples of a batch over all ranks, W world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..errors import ConfigurationError


@dataclass(frozen=True)
class GlobalOrder:
    """The order of samples in each epoch.

    Attributes:
        samples: N.
        batch: B.
        seed: of the order of an epoch, with the epoch's number.
        shuffle: False for the order of the dataset.
        drop_last: what is left over after the last full batch of an epoch is not used.
    """

    samples: int
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1:
            raise ConfigurationError(
                f"there have to be samples and room for them, not {self.samples} samples in batches of {self.batch}"
            )

    def end(self, start: int = 0) -> int:
        """Where batches end that begin at a sample's number of an epoch."""
        left = max(0, self.samples - start)
        return start + (left - left % self.batch if self.drop_last else left)

    def check_even(self, ranks: int, start: int = 0) -> None:
        """Every rank gets as many samples of each batch as any other.

        Raises:
            ConfigurationError: it can't: a mean over ranks would not be the mean over samples.
        """
        if self.batch % ranks:
            raise ConfigurationError(
                f"a batch of {self.batch} samples can't be shared evenly by {ranks} ranks, and the mean over ranks "
                f"would not be the mean over samples. Pass a global_batch_size that {ranks} divides"
            )
        last = (self.end(start) - start) % self.batch
        if last % ranks:
            raise ConfigurationError(
                f"the last batch of an epoch has {last} samples ({self.samples - start} in batches of {self.batch}), "
                f"which {ranks} ranks can't share evenly. Pass drop_last=True"
            )

    def part(self, epoch: int, start: int, rank: int, ranks: int) -> list[int]:
        """A rank's samples of the batch that begins at number ``start`` of an epoch."""
        each = (min(start + self.batch, self.end(start)) - start) // ranks
        first = start + rank * each
        if not self.shuffle:
            return list(range(first, first + each))
        taken: list[int] = _shuffled(self.samples, self.seed, epoch)[first : first + each].tolist()
        return taken


@lru_cache(maxsize=2)
def _shuffled(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """[N] int64."""
    generator = torch.Generator()
    # neighbours in seed and in epoch have nothing in common
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63)
    return torch.randperm(samples, generator=generator)
