"""A job that ends in the middle goes on to the bit: data, random states, scheduler and scaler; on other ranks too."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import shardkit
from shardkit.errors import RankFailedError
from tests.pools import ForkedPool, rank_pool

ROOT = Path(__file__).parents[2]


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """96 samples with transforms that draw from every generator."""

    def __init__(self, noisy: bool = True) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(96, 6, generator=generator, dtype=torch.float64)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = self.inputs[index]
        if self.noisy:
            x = x + 0.1 * (torch.randn(6) + random.random() + float(numpy.random.rand()))
        return x, self.inputs[index].sum(), index


class Training:
    """Everything that a training has, and one loop over it."""

    def __init__(self, strategy: str, workers: int = 0, noisy: bool = True) -> None:
        torch.manual_seed(0)
        drop = nn.Dropout(0.3) if noisy else nn.Identity()
        model: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), drop, nn.Linear(9, 1)).double()
        if strategy == "fsdp":
            model[0] = shardkit.FSDP(model[0])
            self.model: Any = shardkit.FSDP(model)
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        else:
            self.optimizer = shardkit.OSS(model.parameters(), torch.optim.AdamW, lr=0.05)
            self.model = shardkit.ShardedDDP(model, self.optimizer)
        self.averaged = self.model if strategy == "fsdp" else model
        self.ema = AveragedModel(self.averaged, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.scaler = shardkit.ShardedGradScaler(init_scale=4.0, growth_interval=3)
        self.loader: Any = shardkit.ResumableLoader(
            Digits(noisy), 12, seed=2, num_workers=workers, persistent_workers=workers > 0
        )
        self.done = 0
        self.losses: list[float] = []
        self.samples: list[int] = []

    @property
    def parts(self) -> dict[str, Any]:
        """For save and restore."""
        names = ("model", "optimizer", "scheduler", "scaler", "loader", "ema")
        return {name: getattr(self, name) for name in names}

    def restore(self, folder: str) -> None:
        """Goes to the latest checkpoint."""
        found = shardkit.restore(folder, **self.parts)
        self.done = found.step

    def run(self, until: int, folder: str | None = None, save_at: int | None = None) -> None:
        """Trains until so many steps are done."""
        while True:
            for x, y, index in self.loader:
                self.optimizer.zero_grad()
                loss = (self.model(x).squeeze(1) - y).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.ema.update_parameters(self.averaged)
                self.done += 1
                self.losses.append(float(loss.detach()))
                self.samples += index.tolist()
                if folder is not None and self.done == save_at:
                    shardkit.save(folder, step=self.done, **self.parts)
                if self.done == until:
                    return

    def weights(self) -> list[torch.Tensor]:
        """As one process has them."""
        return [t.clone() for m in (self.model, self.ema) for t in m.state_dict().values()]


def _straight(rank: int, strategy: str, folder: str) -> tuple[list[float], list[int], list[torch.Tensor]]:
    training = Training(strategy)
    training.run(40)
    return training.losses, training.samples, training.weights()


def _first(rank: int, strategy: str, folder: str, workers: int) -> list[float]:
    training = Training(strategy, workers)
    training.run(19, folder, save_at=17)  # two more, which are lost
    return training.losses[:17]


def _second(rank: int, strategy: str, folder: str, workers: int) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(77 + rank)
    random.seed(78)
    training = Training(strategy, workers)
    training.restore(folder)
    training.run(40)
    return training.losses, training.weights()


@pytest.mark.parametrize(("strategy", "workers"), [("fsdp", 0), ("oss", 0)])
def test_to_the_bit(strategy: str, workers: int, tmp_path: Path) -> None:
    pool = rank_pool(2)
    whole = pool.run(_straight, strategy, str(tmp_path))
    begun = pool.run(_first, strategy, str(tmp_path), workers)
    resumed = pool.run(_second, strategy, str(tmp_path), workers)
    for (losses, _, weights), first, (second, found) in zip(whole, begun, resumed, strict=True):
        assert first + second == losses
        assert all(map(torch.equal, found, weights))


def _killed(rank: int, folder: str, phase: str) -> None:
    """Workers load the data, and a kill is a kill."""
    training = Training("fsdp", workers=2)
    if phase == "first":
        training.run(20, folder, save_at=17)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        training.run(40)
    training.restore(folder)
    training.run(40)
    torch.save((training.losses, training.weights()), f"{folder}/result{rank}.pt")


def test_killed_with_workers(tmp_path: Path) -> None:
    whole = rank_pool(2).run(_straight, "fsdp", str(tmp_path))
    with ForkedPool(2) as pool:
        with pytest.raises(RankFailedError, match="SIGKILL"):
            pool.run(_killed, str(tmp_path), "first")
        pool.run(_killed, str(tmp_path), "second")
    for rank, (losses, _, weights) in enumerate(whole):
        second, found_weights = torch.load(tmp_path / f"result{rank}.pt")
        assert second == losses[17:]
        assert all(map(torch.equal, found_weights, weights))


def _some_steps(rank: int, folder: str, until: int) -> tuple[list[float], list[int]]:
    training = Training("fsdp", noisy=False)
    if shardkit.latest(folder) is not None:
        training.restore(folder)
    training.run(until, folder, save_at=until)
    return training.losses, training.samples


def test_ranks_leave_and_come_back(tmp_path: Path) -> None:
    losses, samples = [], []
    for ranks, until in ((4, 10), (3, 20), (4, 32)):
        results = rank_pool(ranks).run(_some_steps, str(tmp_path), until)
        losses += [sum(step) / ranks for step in zip(*(r[0] for r in results), strict=True)]
        each = 12 // ranks
        parts = [[r[1][k : k + each] for k in range(0, len(r[1]), each)] for r in results]
        samples += [i for step in zip(*parts, strict=True) for part in step for i in part]
    alone = shardkit.launch(_some_steps, 1, backend="simulated", args=(str(tmp_path / "alone"), 32))[0]
    assert samples == alone[1]
    epochs = [samples[k : k + 96] for k in range(0, len(samples), 96)]
    assert all(sorted(epoch) == list(range(96)) for epoch in epochs)
    assert losses == pytest.approx(alone[0], abs=1e-6)
