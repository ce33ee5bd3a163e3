"""Evaluation on several ranks with every sample used exactly once, whatever their number.

torch's ``DistributedSampler`` makes ranks even: it repeats samples or drops some, and both falsify a metric. Here some
ranks have one sample fewer. Where the model's forward is a collective (FSDP), ranks still have to call it equally
often: :func:`in_step` sees to that.

Legend: N samples, W world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from ..backend import Backend
from ..data.ranks import rank_of_job
from ..errors import ConfigurationError

T = TypeVar("T")


class EvaluationSampler(Sampler[int]):
    """Gives rank r the samples r, r + W, r + 2W, ... and nothing twice.

    ::

        sampler = EvaluationSampler(dataset)
        for batch, counts in in_step(DataLoader(dataset, batch_size=32, sampler=sampler)):
            scores = model(batch)
            if counts:
                ...

    Args:
        dataset: anything with a length N.
        num_replicas: W; by default that of the job.
        rank: by default the calling rank.
        backend: name or instance of the backend that knows them; by default the CPU's.

    Raises:
        ConfigurationError: ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        backend: str | Backend | None = None,
    ) -> None:
        self.rank, self.num_replicas = rank_of_job(rank, num_replicas, backend)
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))

    @property
    def most(self) -> int:
        """Samples of the rank that has most."""
        return -(-len(self.dataset) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the order is always that of the dataset. For loops that call it on any sampler."""

    def in_order(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Results of all ranks, [n_r, ...] each, in the order of the dataset, [N, ...].

        Raises:
            ConfigurationError: a rank has not one row for each of its samples.
        """
        counts = [len(range(r, len(self.dataset), self.num_replicas)) for r in range(self.num_replicas)]
        if [len(p) for p in parts] != counts:
            raise ConfigurationError(
                f"expected the results of {counts} samples from the ranks, got {[len(p) for p in parts]}"
            )
        whole = parts[0].new_empty(len(self.dataset), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            whole[rank :: self.num_replicas] = part
        return whole


def in_step(loader: DataLoader[T]) -> Iterator[tuple[T, bool]]:
    """Batches of a loader with an :class:`EvaluationSampler`, equally many on all ranks.

    Yields:
        The batch, and whether it counts. A rank that has no more of its own gets one again that does not.

    Raises:
        ConfigurationError: the loader has another sampler, or no fixed batch size.
    """
    sampler = loader.sampler
    if not isinstance(sampler, EvaluationSampler) or loader.batch_size is None or loader.drop_last:
        raise ConfigurationError(
            "in_step takes a DataLoader with an EvaluationSampler, a batch_size, and drop_last=False; "
            f"got a {type(sampler).__name__}, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        )
    steps, done, batch = -(-sampler.most // loader.batch_size), 0, None
    for batch in loader:
        yield batch, True
        done += 1
    for _ in range(steps - done):
        if batch is None:  # more ranks than samples
            batch = loader.collate_fn([loader.dataset[0]])
        yield batch, False
