"""A DataLoader that knows its place among the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ..backend import Backend
from ..errors import ConfigurationError
from ..types import Kwargs, StateDict
from .sampler import GlobalBatchSampler
from .seeding import Asked, SeededCollate, SeededSamples
from .worker import Worker

T = TypeVar("T")

_OURS = frozenset({"batch_size", "sampler", "batch_sampler", "generator"})


class ResumableLoader(Generic[T]):
    """A loader that goes on where it was: after a kill, with other workers, on another number of ranks.

    ::

        loader = shardkit.ResumableLoader(dataset, global_batch_size=64, num_workers=2)
        shardkit.restore_training("checkpoints", model=model, optimizer=optimizer, loader=loader)
        for epoch in range(loader.epoch, 10):
            for images, labels in loader:
                ...
                shardkit.save_training(
                    "checkpoints", model=model, optimizer=optimizer, loader=loader, step=step
                )

    A place is the epoch and the number of samples that *all ranks* have used of it, counted when a batch is handed
    out: what workers have loaded ahead does not count. Random transforms (``torch``, ``random``, ``numpy.random``) are
    seeded by the sample and the epoch. So samples have the same values with any number of workers and of ranks, and
    generators of the training process are not touched.

    A loop that is left early keeps its place for ``state_dict``; another loop begins the epoch again. A loop that comes
    to its end goes on to the next epoch.

    Args:
        dataset: with a length and numbered samples.
        global_batch_size, shuffle, seed, drop_last, num_replicas, rank, backend: as of :class:`GlobalBatchSampler`.
        options: further ones of ``torch.utils.data.DataLoader`` (num_workers, collate_fn, pin_memory, ...).

    Raises:
        ConfigurationError: W does not divide a batch; the dataset has no numbers; an option is the sampler's.
    """

    def __init__(
        self, dataset: Dataset[T], global_batch_size: int, *, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, num_replicas: int | None = None, rank: int | None = None,
        backend: str | Backend | None = None, **options: object,
    ) -> None:  # fmt: skip
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                "a ResumableLoader needs a dataset with a length and numbered samples; for a stream use torchdata's "
                "StatefulDataLoader, whose place each rank saves"
            )
        if taken := _OURS & set(options):
            raise ConfigurationError(
                f"{', '.join(sorted(taken))}: a ResumableLoader has its own; pass global_batch_size, shuffle, seed"
            )
        self.dataset = dataset
        self.sampler = GlobalBatchSampler(
            cast(Sized, dataset), global_batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
            num_replicas=num_replicas, rank=rank, backend=backend,
        )  # fmt: skip
        given: Kwargs = dict(options)
        collate = SeededCollate(given.pop("collate_fn", None) or default_collate)
        # the generator: workers' seeds shall not be drawn from the one that trains, once more in each process
        self._loader: DataLoader[T] = DataLoader(
            SeededSamples(dataset, seed),
            batch_sampler=_AskedBatches(self.sampler),
            collate_fn=cast("Callable[[list[T]], T]", collate),
            generator=torch.Generator(),
            worker_init_fn=Worker(given.pop("worker_init_fn", None), given.get("multiprocessing_context")),
            **given,
        )
        self._used = 0

    @property
    def epoch(self) -> int:
        """The one under way, or the next."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; nothing if it is the one under way."""
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)
            self._used = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[T]:
        order, epoch = self.sampler.order, self.sampler.epoch
        self._used = self.sampler.start
        end = order.end(self._used)
        for batch in self._loader:
            self._used = min(self._used + order.batch, end)
            yield batch
        if self.sampler.epoch == epoch:
            self.set_epoch(epoch + 1)

    def state_dict(self) -> StateDict:
        """The place; the same on all ranks."""
        return self.sampler.state_of(self.sampler.epoch, self._used)

    def load_state_dict(self, state: StateDict) -> None:
        """The next loop begins at this place.

        Raises:
            ConfigurationError: it is of another dataset or order, or W does not divide what is left.
        """
        self.sampler.load_state_dict(state)
        self._used = self.sampler.start


class _AskedBatches(Sampler[list[Asked]]):
    """Batches of the sampler with the epoch that they are of: workers that persist know no other way."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[Asked]]:
        epoch = self._sampler.epoch
        for part in self._sampler:
            yield [Asked(epoch, index) for index in part]

    def __len__(self) -> int:
        return len(self._sampler)
