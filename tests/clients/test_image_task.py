"""The ClassyVision-like task with ZeRO on ranks, resumed in a new task, against itself in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.image_task import AverageOfWeights, Batch, Checkpoint, Options, Task
from tests.clients.one_process import BuffersOfRanks
from tests.pools import rank_pool

BATCHES = 4  # of an epoch


def batch_of(phase: int, number: int, rank: int) -> Batch:
    made = torch.Generator().manual_seed(1000 * phase + 10 * number + rank)
    x = torch.randn(3 + rank, 3, 6, 6, generator=made)  # ranks have batches of other sizes
    return x, (x.mean(dim=(2, 3)).argmax(dim=1) + (x[:, 0, 0, 0] > 1).long())


class AloneTask(Task):
    """In one process: a batch is a list, of one for each rank."""

    world = 2

    def __init__(self, options: Options, *args: Any) -> None:
        super().__init__(dataclasses.replace(options, zero=False), *args)
        self.buffers = BuffersOfRanks(self.base_model, self.world)

    def forward_backward(self, batch: list[Batch]) -> float:
        losses = []
        for rank, own in enumerate(batch):
            with self.buffers.of(rank):
                loss = self.loss(own)
                self.backward(loss / (self.world * self.options.optimizer_period))
            losses.append(loss.item())
        return sum(losses) / self.world

    def train_step(self, batch: Any, number: int, where: float) -> None:
        super().train_step(batch, number, where)
        if (number + 1) % self.options.optimizer_period == 0:
            self.buffers.follow_first()

    @torch.no_grad()
    def eval_step(self, batch: list[Batch]) -> None:
        self.losses.append(float(sum(self.loss(own) for own in batch)) / self.world)


class AloneTaskOf3(AloneTask):
    world = 3


def train(kind: type[Task], options: Options, folder: Path, rank: int | None, world: int) -> dict[str, Any]:
    """Trains and tests in turn; after each training another task goes on from its file."""
    folder.mkdir(exist_ok=True)
    losses: list[float] = []
    rates: list[list[float]] = []
    scales: list[float] = []
    kept: list[dict[str, torch.Tensor]] = []
    state = None
    for phases in ([0], [1, 2], [3]):
        average = AverageOfWeights(0.8)
        task = kind(options, [average, Checkpoint(folder)], state)
        for phase in phases:
            assert task.phase == phase
            batches = [
                batch_of(phase, n, rank)
                if rank is not None
                else [batch_of(phase, n, r) for r in range(world)]
                for n in range(BATCHES)
            ]
            task.run_phase(batches, 2 * BATCHES // options.optimizer_period)
        losses += task.losses
        rates += task.rates
        scales += task.scales
        kept += [{k: v.clone() for k, v in task.base_model.state_dict().items()}, average.average]
        if rank is not None:
            torch.distributed.barrier()  # rank 0 has written it
        state = torch.load(folder / f"phase{phases[-1] // 2 * 2}.pt")
    return {"losses": losses, "rates": rates, "scales": scales, "models and averages": kept}


def _rank(rank: int, options: Options, folder: Path, world: int) -> dict[str, Any]:
    return train(Task, options, folder, rank, world)


CASES = [
    (2, Options(clip_grad_norm=0.5)),
    (3, Options(optimizer="adamw", optimizer_period=2)),
    (
        2,
        Options(
            optimizer="adamw", optimizer_period=2, clip_grad_norm=0.3, amp=torch.float16, init_scale=2.0**24
        ),
    ),
    (2, Options(amp=torch.bfloat16)),
]


def check(results: list[dict[str, Any]], folder: Path, options: Options, world: int) -> None:
    """Results of ranks, and the file that rank 0 wrote last in ``folder / "ranks"``, are those of one process."""
    # scales and two ranks' mean are powers of two and each rank's batch goes through the model by itself, so half
    # precision is no excuse
    close = {"rtol": 1e-4, "atol": 1e-5}
    truth = train(AloneTaskOf3 if world == 3 else AloneTask, options, folder / "alone", None, world)
    losses = torch.tensor([r.pop("losses") for r in results]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(truth.pop("losses")), **close)
    if options.init_scale > 2**20:  # the first step overflows, no other does
        assert truth["scales"] == [2.0**10] * 4
    for result in results:
        torch.testing.assert_close(result, truth, **close)
    many, one = (torch.load(folder / part / "phase2.pt") for part in ("ranks", "alone"))
    for state in (many, one):
        del state["scaler"]
    torch.testing.assert_close(many, one, **close)


@pytest.mark.parametrize(("world", "options"), CASES)
def test_trains_as_one_process(world: int, options: Options, tmp_path: Path) -> None:
    results = rank_pool(world).run(_rank, options, tmp_path / "ranks", world)
    check(results, tmp_path, options, world)
