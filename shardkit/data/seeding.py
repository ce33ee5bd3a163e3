"""Random transforms of a sample that depend on the sample alone, not on who loads it or what was loaded before."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, get_worker_info

T = TypeVar("T")


class Asked(NamedTuple):
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
        seed: of the job.
    """

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, asked: Sequence[Asked]) -> Samples[T]:
        found: Samples[T] = Samples()
        with _generators_kept():
            at_once = getattr(self._dataset, "__getitems__", None)
            if at_once is not None:
                self._begin(asked[0])
                found.extend(at_once([a.number for a in asked]))
            else:
                for one in asked:
                    self._begin(one)
                    found.append(self._dataset[one.number])
        found.seed = _mixed(self._seed, asked[0].epoch, asked[0].number, "batch")
        return found

    def _begin(self, asked: Asked) -> None:
        _seed_generators(_mixed(self._seed, asked.epoch, asked.number, "sample"))


class SeededCollate(Generic[T]):
    """What makes a batch of samples, seeded by them."""

    def __init__(self, collate: Callable[[list[T]], object]) -> None:
        self._collate = collate

    def __call__(self, samples: Samples[T]) -> object:
        with _generators_kept():
            _seed_generators(samples.seed)
            return self._collate(list(samples))


def _mixed(seed: int, epoch: int, index: int, use: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}/{use}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """In a worker nobody else uses them."""
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
