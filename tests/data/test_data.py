"""Places in data: every sample once on changing ranks, the same values with any workers, and what is refused."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from shardkit import GlobalBatchSampler, ResumableLoader
from shardkit.errors import ConfigurationError
from shardkit.training.data import Worker


class Noisy(Dataset[torch.Tensor]):
    """Samples with transforms that draw from every generator."""

    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        return torch.tensor([float(index), *drawn])


def _noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) * 0 + random.random()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sample_once_while_ranks_come_and_go(data: st.DataObject) -> None:
    batch = 12
    samples = data.draw(st.integers(1, 60))
    drop_last = samples % batch % 12 != 0 or data.draw(st.booleans())
    epoch, start = data.draw(st.integers(0, 3)), 0
    used: list[int] = []
    state = None
    order: list[list[int]] = []
    while True:
        ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
        samplers = [
            GlobalBatchSampler(range(samples), batch, seed=3, drop_last=drop_last, num_replicas=ranks, rank=r)
            for r in range(ranks)
        ]
        for s in samplers:
            s.set_epoch(epoch)
            if state is not None:
                s.load_state_dict(state)
        steps = data.draw(st.integers(1, 3))
        iterators = [iter(s) for s in samplers]
        for _ in range(steps):
            parts = [next(i, None) for i in iterators]
            if parts[0] is None:
                assert all(p is None for p in parts)
                expected = samples - samples % batch if drop_last else samples
                assert len(used) == len(set(used)) == expected
                whole = GlobalBatchSampler(
                    range(samples), batch, seed=3, drop_last=drop_last, num_replicas=1, rank=0
                )
                whole.set_epoch(epoch)
                assert order == list(whole)
                return
            order.append([i for p in parts if p is not None for i in p])
            used += order[-1]
            start = min(start + batch, samples)
        state = samplers[0].state_of(epoch, start)


def test_epochs_have_different_orders() -> None:
    sampler = GlobalBatchSampler(range(100), 10, num_replicas=1, rank=0)
    orders = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        orders.append([i for b in sampler for i in b])
    assert all(sorted(o) == list(range(100)) for o in orders)
    assert all(a != b for a, b in pairwise(orders))
    plain = GlobalBatchSampler(range(10), 4, shuffle=False, drop_last=True, num_replicas=2, rank=1)
    assert list(plain) == [[2, 3], [6, 7]]
    assert len(plain) == 2


def _loader(
    rank: int = 0, ranks: int = 1, workers: int = 0, samples: int = 24, **options: object
) -> ResumableLoader:
    return ResumableLoader(
        Noisy(samples), 6, seed=5, num_replicas=ranks, rank=rank, num_workers=workers, **options
    )


def _epoch(loader: ResumableLoader) -> torch.Tensor:
    return torch.cat(list(loader))


def test_values_are_those_of_the_sample_with_any_workers_and_ranks() -> None:
    whole = _loader()
    first, second = _epoch(whole), _epoch(whole)
    assert (whole.epoch, sorted(first[:, 0].tolist())) == (2, [float(i) for i in range(24)])
    by_index = [e[e[:, 0].argsort()] for e in (first, second)]
    assert not (by_index[0][:, 1:] == by_index[1][:, 1:]).any(), "another epoch, other values"
    workers = _loader(workers=2, persistent_workers=True)
    assert torch.equal(_epoch(workers), first)
    assert torch.equal(_epoch(workers), second), "workers that persist know the epoch"
    parts = [list(_loader(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([torch.cat(step) for step in zip(*parts, strict=True)]), first)


def test_what_makes_batches_draws_the_same_with_workers() -> None:
    a = list(_loader(collate_fn=_noisy_collate))
    b = list(_loader(workers=2, collate_fn=_noisy_collate))
    assert all(map(torch.equal, a, b))


def test_generators_of_the_training_process_are_not_touched() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = float(torch.rand(())), random.random(), float(numpy.random.rand())
    for workers in (0, 2):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        _epoch(_loader(workers=workers))
        assert (float(torch.rand(())), random.random(), float(numpy.random.rand())) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_is_what_was_handed_out(workers: int) -> None:
    whole = _loader()
    expected = [*whole, *whole]
    loader = _loader(workers=workers)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 3:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 18)
    resumed = _loader(workers=2 - workers)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)  # as loops do; it is under way
    assert resumed.state_dict() == state
    seen += [*resumed, *resumed]
    assert all(map(torch.equal, seen, expected))
    assert len(seen) == len(expected)
    assert resumed.epoch == 2


def test_a_place_at_the_very_end_of_an_epoch() -> None:
    loader = _loader()
    states = [loader.state_dict() for _ in loader]
    assert [s["samples"] for s in states] == [6, 12, 18, 24]
    resumed = _loader()
    resumed.load_state_dict(states[-1])
    assert (list(resumed), resumed.epoch) == ([], 1)
    assert len(list(resumed)) == 4


def test_a_loop_that_was_left_begins_again() -> None:
    loader = _loader()
    first = next(iter(loader))
    assert torch.equal(next(iter(loader)), first)
    loader.set_epoch(1)
    assert loader.state_dict()["samples"] == 0


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    loader = _loader()
    used = [i for _, batch in zip(range(2), loader, strict=False) for i in batch[:, 0].tolist()]
    other = ResumableLoader(Noisy(), 4, seed=5, num_replicas=2, rank=0)
    peer = ResumableLoader(Noisy(), 4, seed=5, num_replicas=2, rank=1)
    for one in (other, peer):
        one.load_state_dict(loader.state_dict())
        used += [i for batch in one for i in batch[:, 0].tolist()]
    assert sorted(used) == [float(i) for i in range(24)]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_process_on_its_own_is_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(ResumableLoader(Noisy(), 6))) == 4
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="no process group exists yet"):
        ResumableLoader(Noisy(), 6)


def test_refused() -> None:
    with pytest.raises(ConfigurationError, match="16 samples can't be shared evenly by 3 ranks"):
        GlobalBatchSampler(range(48), 16, num_replicas=3, rank=0)
    with pytest.raises(ConfigurationError, match=r"last batch of an epoch has 5 samples.*drop_last=True"):
        GlobalBatchSampler(range(17), 6, num_replicas=3, rank=0)
    with pytest.raises(ConfigurationError, match="pass 0 to 1"):
        GlobalBatchSampler(range(4), 2, num_replicas=2, rank=2)
    with pytest.raises(ConfigurationError, match="StatefulDataLoader"):
        ResumableLoader(_Stream(), 2, num_replicas=1, rank=0)
    with pytest.raises(ConfigurationError, match="batch_size: a ResumableLoader has its own"):
        _loader(batch_size=3)
    state = _loader().state_dict()
    with pytest.raises(ConfigurationError, match="dataset_size=24, this has 30"):
        _loader(samples=30).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="not the state of a GlobalBatchSampler"):
        _loader().load_state_dict({"epoch": 1})


@pytest.mark.parametrize("workers", [0, 2])
def test_with_torchdata_on_another_number_of_ranks(workers: int) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(rank: int, ranks: int) -> object:
        sampler = GlobalBatchSampler(range(24), 6, seed=5, num_replicas=ranks, rank=rank)
        return loading.StatefulDataLoader(
            list(range(24)), batch_sampler=sampler, num_workers=workers, generator=torch.Generator()
        )

    expected = [b.tolist() for b in loader(0, 1)]
    states = []
    parts = []
    for rank in range(2):
        one = loader(rank, 2)
        iterator = iter(one)
        parts.append([next(iterator).tolist() for _ in range(2)])
        states.append(one.state_dict())
        del iterator
    assert [a + b for a, b in zip(*parts, strict=True)] == expected[:2]
    resumed = []
    for rank in range(3):
        one = loader(rank, 3)
        one.load_state_dict(states[0])
        resumed.append([b.tolist() for b in one])
    assert [a + b + c for a, b, c in zip(*resumed, strict=True)] == expected[2:]
    if workers == 0:
        assert states[0] == states[1]


def _orphan(to_tell: object) -> None:
    """Forks what stands for a worker, and ends before that one begins."""
    worker = multiprocessing.get_context("fork").Process(target=_begin_late, args=(to_tell,))
    worker.start()
    os._exit(0)


def _begin_late(to_tell: Any) -> None:
    while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.01)
    Worker(None, "fork")(0)
    to_tell.send("it loads samples for nobody")


def test_workers_of_a_rank_that_is_gone_end() -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("fork").Process(target=_orphan, args=(there,))
    rank.start()
    there.close()
    rank.join(20)
    with pytest.raises(EOFError):
        here.recv()
