"""Batches of all ranks together, of which each rank gets its part."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from ..backend import Backend
from ..errors import ConfigurationError
from ..types import StateDict
from .order import GlobalOrder
from .ranks import rank_of_job


class GlobalBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for a DataLoader. Its place is the number of samples that *all ranks* have used of an epoch.

    Batches have the same samples on any number of ranks, so that a job can go on with fewer or more: rank r takes the
    r-th of W equal parts of each. :class:`ResumableLoader` has one; with torchdata::

        sampler = GlobalBatchSampler(dataset, 64, seed=1)
        loader = StatefulDataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())

    Args:
        dataset: anything with a length N.
        global_batch_size: B, samples of a batch over all ranks; W has to divide it.
        shuffle: a new order each epoch, the same on all ranks; else that of the dataset.
        seed: of the orders.
        drop_last: leave out what is left over after the last full batch of an epoch; otherwise it is a smaller batch,
            which W has to divide.
        num_replicas: W; by default that of the job.
        rank: by default the calling rank.
        backend: name or instance of the backend that knows them; by default the CPU's.

    Raises:
        ConfigurationError: W does not divide a batch.
    """

    def __init__(
        self, dataset: Sized, global_batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
        num_replicas: int | None = None, rank: int | None = None, backend: str | Backend | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.num_replicas = rank_of_job(rank, num_replicas, backend)
        self.order = GlobalOrder(len(dataset), global_batch_size, seed, shuffle, drop_last)
        self.order.check_even(self.num_replicas)
        self.epoch = 0
        self._start = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return -(-self.order.end() // self.order.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """From the place that was loaded, once; else from the beginning of the epoch."""
        begin, self._start = self._start, 0
        return _Batches(self, self.epoch, begin)

    @property
    def start(self) -> int:
        """Where the next iteration begins: samples of the epoch that all ranks have used."""
        return self._start

    def set_epoch(self, epoch: int) -> None:
        """The order is that of this epoch. A place that was loaded stays if it is in this epoch."""
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def state_of(self, epoch: int, samples: int) -> StateDict:
        """The state at some place; the same on all ranks."""
        order = self.order
        return {
            "epoch": epoch,
            "samples": samples,
            "dataset_size": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Goes to a place; the world size and the size of batches may be others.

        Raises:
            ConfigurationError: it is of another dataset or order, or W does not divide what is left.
        """
        here = self.state_of(0, 0)
        if set(state) != set(here):
            raise ConfigurationError(f"not the state of a GlobalBatchSampler: {sorted(state)}")
        for name in ("dataset_size", "seed", "shuffle"):
            if state[name] != here[name]:
                raise ConfigurationError(
                    f"the saved place is in data with {name}={state[name]!r}, this has {here[name]!r}: samples would "
                    "be used twice or never. Make the sampler as it was, or begin without its state"
                )
        self.order.check_even(self.num_replicas, state["samples"])
        self.epoch, self._start = state["epoch"], state["samples"]

    def state_dict(self) -> StateDict:
        """Where the next iteration begins. What an iteration under way has given is known to who iterates."""
        return self.state_of(self.epoch, self._start)


class _Batches(Iterator[list[int]]):
    """One epoch's batches of a rank; torchdata asks it for its state."""

    def __init__(self, sampler: GlobalBatchSampler, epoch: int, start: int) -> None:
        self._sampler, self._epoch, self._start = sampler, epoch, start
        self._end = sampler.order.end(start)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[int]:
        if self._start >= self._end:
            raise StopIteration
        sampler = self._sampler
        part = sampler.order.part(self._epoch, self._start, sampler.rank, sampler.num_replicas)
        self._start = min(self._start + sampler.order.batch, self._end)
        return part

    def state_dict(self) -> StateDict:
        return self._sampler.state_of(self._epoch, self._start)

    def load_state_dict(self, state: StateDict) -> None:
        self._sampler.load_state_dict(state)
        self._epoch, self._start = self._sampler.epoch, self._sampler.start
        self._sampler._start = 0  # this iteration has it now
        self._end = self._sampler.order.end(self._start)
