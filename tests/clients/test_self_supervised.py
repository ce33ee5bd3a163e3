"""The VISSL-like task on ranks, resumed from shards and from the consolidated file, against itself in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.one_process import BuffersOfRanks
from tests.clients.self_supervised import Config, Crops, Task, consolidate
from tests.pools import rank_pool

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def crops_of(step: int, number: int, rank: int) -> Crops:
    made = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    images = torch.randn(3 + rank, 3, 9, 9, generator=made)  # ranks have batches of other sizes
    return [images, images[:, :, 1:8, 1:8] * 1.1, images.flip(3)[:, :, :7, 2:]]


class AloneTask(Task):
    """In one process: a batch is a list, of one for each rank."""

    def __init__(self, config: Config, world: int) -> None:
        super().__init__(dataclasses.replace(config, fsdp=False, mixed_precision=False))
        self.ranks = world
        self.buffers = BuffersOfRanks(self.model, world)

    def forward_backward(self, batch: list[Crops]) -> float:
        losses = []
        for rank, crops in enumerate(batch):
            with self.buffers.of(rank):
                loss = self.loss(crops)
                self.backward(loss / (self.ranks * self.config.accumulation))
            losses.append(loss.item())
        return sum(losses) / self.ranks


def batches_of(task: Task, rank: int | None) -> list[Any]:
    """A step's: of this rank, or (None) lists of all ranks'."""
    step, numbers = task.iteration, range(task.config.accumulation)
    if rank is not None:
        return [crops_of(step, n, rank) for n in numbers]
    assert isinstance(task, AloneTask)
    return [[crops_of(step, n, r) for r in range(task.ranks)] for n in numbers]


def steps(task: Task, rank: int | None, count: int) -> list[dict[str, float]]:
    return [task.step(batches_of(task, rank)) for _ in range(count)]


def whole(task: Task) -> dict[str, torch.Tensor]:
    with task.whole_model() as model:
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def run(rank: int, config: Config, folder: Path) -> dict[str, Any]:
    """Two steps, features, a file; two more in another task that was loaded from it, and features."""
    folder.mkdir(exist_ok=True)
    task = Task(config)
    stats = steps(task, rank, 2)
    middle = task.extract_features(crops_of(50, 0, 0)[0])
    stats += steps(task, rank, 1)
    task.save_shards(folder)
    task.save_whole_optimizer(folder)
    again = Task(config)
    again.load_shards(folder)
    stats += steps(again, rank, 1)
    tracked, gathered = again.step_with_memory_tracked(batches_of(again, rank))
    stats.append(tracked)
    if rank == 0:
        consolidate(folder)
    torch.distributed.barrier()
    last = Task(config)
    last.load_whole(folder)
    torch.testing.assert_close(steps(last, rank, 2), stats[3:], rtol=1e-5, atol=1e-6)
    if again.wrapping.tracker is not None:
        assert again.model.process_group is again.wrapping.tracker
        assert again.wrapping.tracker.gathered > 0
    assert gathered > 0
    buffers = [b.clone() for b in again.model.buffers()]
    return {"stats": stats, "middle": middle, "parameters": whole(again), "buffers": buffers}


def alone(config: Config, world: int) -> dict[str, Any]:
    task = AloneTask(config, world)
    stats = steps(task, None, 2)
    middle = task.extract_features(crops_of(50, 0, 0)[0])
    stats += steps(task, None, 1)
    saved = {k: v.clone() for k, v in task.model.state_dict().items()}
    stats += steps(task, None, 2)
    return {
        "stats": stats,
        "middle": middle,
        "saved": saved,
        "parameters": whole(task),
        "buffers": task.buffers,
    }


def mean_of(results: list[dict[str, Any]], key: str) -> torch.Tensor:
    return torch.tensor([[stat[key] for stat in r["stats"]] for r in results]).mean(dim=0)


CASES = [
    (2, Config()),
    (2, Config(flatten_parameters=False, accumulation=2)),
    (3, Config(accumulation=2, checkpoint_activations=False)),
]


def check(results: list[dict[str, Any]], folder: Path, config: Config, world: int) -> None:
    """Ranks' results, and what they wrote into ``folder``, are those of one process."""
    truth = alone(config, world)
    for key in ("loss", "norm"):
        expected = torch.tensor([stat[key] for stat in truth["stats"]])
        torch.testing.assert_close(mean_of(results, key), expected, **CLOSE)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["parameters"], truth["parameters"], **CLOSE)
        torch.testing.assert_close(result["buffers"], truth["buffers"].kept(rank), **CLOSE)
    torch.testing.assert_close(results[0]["middle"], truth["middle"], **CLOSE)
    saved = torch.load(folder / "consolidated.pt")["model"]
    torch.testing.assert_close(dict(saved), truth["saved"], **CLOSE)
    # one process goes on from the consolidated file
    task = AloneTask(config, world)
    task.load_whole(folder)
    torch.testing.assert_close(steps(task, None, 2), truth["stats"][3:], **CLOSE)
    torch.testing.assert_close(whole(task), truth["parameters"], **CLOSE)


@pytest.mark.parametrize(("world", "config"), CASES)
def test_trains_as_one_process(world: int, config: Config, tmp_path: Path) -> None:
    results = rank_pool(world).run(run, config, tmp_path)
    check(results, tmp_path, config, world)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    config = Config(mixed_precision=True, compute_dtype=dtype, fp32_reduce_scatter=dtype == torch.bfloat16)
    results = rank_pool(2).run(run, config, tmp_path)
    expected = alone(config, 2)["stats"]
    close = 0.03 if dtype == torch.float16 else 0.1
    for key in ("loss", "norm"):
        found = mean_of(results, key)
        torch.testing.assert_close(found, torch.tensor([s[key] for s in expected]), rtol=close, atol=close)
    for result in results:
        assert all(p.dtype == torch.float32 for p in result["parameters"].values())
