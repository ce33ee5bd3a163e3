"""Training data whose place is a number: every sample once, whatever is killed, resumed, and on how many ranks.

Which samples are in a batch is arithmetic that knows no rank's past, so that any number of ranks can go on. Random
transforms depend on the sample alone, not on who loads it or what was loaded before.

Legend: N samples, B samples of a batch over all ranks, W world size.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.context import BaseContext
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from ..backend import Backend, backend_of_job, host_random_states, seed_host, set_host_random_states
from ..errors import ConfigurationError
from ..launching.started import started_rank
from ..model_parallel.groups import device_backend, seeded_state
from ..types import Kwargs, StateDict

__all__ = ["GlobalBatchSampler", "ResumableLoader", "microbatch"]


def rank_of_job(
    rank: int | None = None, world_size: int | None = None, backend: str | Backend | None = None
) -> tuple[int, int]:
    """Returns what is given, and the calling rank's for what is not; a process that is on its own is rank 0 of 1."""
    if rank is None or world_size is None:
        own_rank, ranks = _here(backend)
        rank = own_rank if rank is None else rank
        world_size = ranks if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} of {world_size} ranks does not exist; pass 0 to {world_size - 1}"
        )
    return rank, world_size


def _here(backend: str | Backend | None) -> tuple[int, int]:
    try:
        group = backend_of_job(backend).group()
    except ConfigurationError:
        if started_rank() is not None or backend is not None:
            raise  # alone, each would load everything
        return 0, 1
    return group.rank, group.world_size


@dataclass(frozen=True)
class GlobalOrder:
    """The order of samples in each epoch.

    Attributes:
        seed: of the order of an epoch, with the epoch's number.
        shuffle: False for the order of the dataset.
        drop_last: what is left over after the last full step of an epoch is not used.
        rounds: batches of a step.
    """

    samples: int
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1:
            raise ConfigurationError(
                f"there have to be samples and room for them, not {self.samples} samples in batches of {self.batch}"
            )

    def end(self, start: int = 0) -> int:
        """Finds where batches end that begin at a sample's number of an epoch."""
        left = max(0, self.samples - start)
        return start + (left - left % (self.batch * self.rounds) if self.drop_last else left)

    def check_even(self, ranks: int, start: int = 0) -> None:
        """Checks that every rank gets as many samples of each batch as any other."""
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
        """Returns a rank's samples of the batch that begins at number ``start`` of an epoch."""
        each = (min(start + self.batch, self.samples) - start) // ranks
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
    return torch.randperm(samples, generator=generator, device="cpu")


class GlobalBatchSampler(Sampler[list[int]]):
    """Gives a DataLoader its batches. Its place is the number of samples that *all ranks* have used of an epoch.

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
        microbatches: K. What is given is micro-batches then, of B / K samples: rank r gets numbers r, W + r, ... of the
            K that B samples are, so that they are the same on any number of ranks that divides K.

    Attributes:
        epoch, start: where the next iteration begins: samples of the epoch that all ranks have used.

    Raises:
        ConfigurationError: W does not divide a batch, or K; K without ``drop_last``.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        backend: str | Backend | None = None,
        microbatches: int | None = None,
    ) -> None:
        self.rank, self.num_replicas = rank_of_job(rank, num_replicas, backend)
        rounds, batch = 1, global_batch_size
        if microbatches is not None:
            if not drop_last or microbatches % self.num_replicas or global_batch_size % microbatches:
                raise ConfigurationError(
                    f"{global_batch_size} samples of a step in {microbatches} micro-batches for {self.num_replicas} "
                    "ranks: pass drop_last=True, a global_batch_size that microbatches divides, and microbatches that "
                    "the ranks divide"
                )
            rounds = microbatches // self.num_replicas
            batch = global_batch_size // rounds
        self.order = GlobalOrder(len(dataset), batch, seed, shuffle, drop_last, rounds)
        self.order.check_even(self.num_replicas)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Returns how many batches a whole epoch has."""
        return -(-self.order.end() // self.order.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates from the place that was loaded, once; else from the beginning of the epoch."""
        begin, self.start = self.start, 0
        return _Batches(self, self.epoch, begin)

    def set_epoch(self, epoch: int) -> None:
        """Takes the order of this epoch. A place that was loaded stays if it is in this epoch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def state_of(self, epoch: int, samples: int) -> StateDict:
        """Returns the state at some place; the same on all ranks."""
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
        self.epoch, self.start = state["epoch"], state["samples"]

    def state_dict(self) -> StateDict:
        """Tells where the next iteration begins. What an iteration under way has given is known to who iterates."""
        return self.state_of(self.epoch, self.start)


class _Batches(Iterator[list[int]]):
    """One epoch's batches of a rank; torchdata asks it for its state."""

    def __init__(self, sampler: GlobalBatchSampler, epoch: int, start: int) -> None:
        self._sampler, self._epoch, self._start = sampler, epoch, start
        self._end = sampler.order.end(start)

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
        self._sampler.start = 0  # this iteration has it now
        self._end = self._sampler.order.end(self._start)


T = TypeVar("T")


class SampleRequest(NamedTuple):
    """A sample that a loader asks for, and when."""

    epoch: int
    number: int


class Samples(list[T], Generic[T]):
    """Samples of a batch, and the seed of what puts them together."""

    seed: int = 0


class SeededSamples(Dataset[T]):
    """A dataset with random generators seeded for each sample; a process that trains gets its own back.

    Args:
        dataset: indexed by numbers; ``__getitems__`` is used where there is one, with one seed for all.
    """

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, asked: Sequence[SampleRequest]) -> Samples[T]:
        found: Samples[T] = Samples()
        with generators_kept():
            if (at_once := getattr(self._dataset, "__getitems__", None)) is not None:
                self._begin(asked[0])
                found.extend(at_once([a.number for a in asked]))
            else:
                for one in asked:
                    self._begin(one)
                    found.append(self._dataset[one.number])
        found.seed = mixed(self._seed, asked[0].epoch, asked[0].number, "batch")
        return found

    def _begin(self, asked: SampleRequest) -> None:
        seed_host(mixed(self._seed, asked.epoch, asked.number, "sample"))


def collated(collate: Callable[[list[T]], object], samples: Samples[T]) -> object:
    """Makes a batch of samples, seeded by them."""
    with generators_kept():
        seed_host(samples.seed)
        return collate(list(samples))


def mixed(seed: int, epoch: int, index: int, use: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}/{use}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives generators their states back, except in a worker: there nobody else uses them."""
    before = host_random_states() if get_worker_info() is None else None
    try:
        yield
    finally:
        if before is not None:
            set_host_random_states(before)


@contextmanager
def microbatch(number: int, seed: int = 0) -> Iterator[None]:
    """Gives a micro-batch random numbers of its own, whichever rank runs it; afterwards generators go on as before.

    ::

        for k in range(rank, K, world_size):  # of the K micro-batches of a step
            with shardkit.microbatch(step * K + k):
                loss = model(batches[k]).mean()
                loss.backward()

    Seeded are torch's generators of the host and of the device, ``random`` and ``numpy.random``.

    Args:
        number: of the micro-batch, counted over the whole training.
        seed: of the training.
    """
    own = mixed(seed, 0, number, "microbatch")
    backend = device_backend()
    with generators_kept():
        before = backend.rng_state()
        seed_host(own)
        backend.set_rng_state(seeded_state(own))
        try:
            yield
        finally:
            backend.set_rng_state(before)


class Worker:
    """Called in each worker as it begins.

    [Note: orphans] torch's workers end when their parent is another one than in the beginning. Of a rank that was
    killed while its workers started they would load samples for ever, and hold on to its memory and its terminal.

    Args:
        begin: the user's ``worker_init_fn``.
        context: how workers are started, as a DataLoader takes it.
    """

    def __init__(self, begin: Callable[[int], object] | None, context: str | BaseContext | None) -> None:
        self._begin = begin
        name = context.get_start_method() if isinstance(context, BaseContext) else context
        self._is_child = (name or multiprocessing.get_start_method()) != "forkserver"

    def __call__(self, number: int) -> None:
        parent = multiprocessing.parent_process()
        if self._is_child and parent is not None and os.getppid() != parent.pid:
            os._exit(0)  # see [Note: orphans]
        if self._begin is not None:
            self._begin(number)


_OURS = frozenset({"batch_size", "sampler", "batch_sampler", "generator"})


class ResumableLoader(Generic[T]):
    """Loads batches and goes on where it was: after a kill, with other workers, on another number of ranks.

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
        global_batch_size, shuffle, seed, drop_last, num_replicas, rank, backend, microbatches: as of
            :class:`GlobalBatchSampler`.
        options: further ones of ``torch.utils.data.DataLoader`` (num_workers, collate_fn, pin_memory, ...).

    Raises:
        ConfigurationError: W does not divide a batch; the dataset has no numbers; an option is the sampler's.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        backend: str | Backend | None = None,
        microbatches: int | None = None,
        **options: object,
    ) -> None:
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
            cast(Sized, dataset),
            global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
            backend=backend,
            microbatches=microbatches,
        )
        given: Kwargs = dict(options)
        collate = partial(collated, given.pop("collate_fn", None) or default_collate)
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
        """Returns the one under way, or the next."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; nothing if it is the one under way."""
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)
            self._used = 0

    def __len__(self) -> int:
        """Returns how many batches a whole epoch has."""
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
        """Returns the place; the same on all ranks."""
        return self.sampler.state_of(self.sampler.epoch, self._used)

    def load_state_dict(self, state: StateDict) -> None:
        """Sets the place at which the next loop begins.

        Raises:
            ConfigurationError: it is of another dataset or order, or W does not divide what is left.
        """
        self.sampler.load_state_dict(state)
        self._used = self.sampler.start


class _AskedBatches(Sampler[list[SampleRequest]]):
    """Batches of the sampler with the epoch that they are of: workers that persist know no other way."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        epoch = self._sampler.epoch
        for part in self._sampler:
            yield [SampleRequest(epoch, index) for index in part]

    def __len__(self) -> int:
        return len(self._sampler)
