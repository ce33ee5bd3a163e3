"""The Lightning-style trainer with its sharded strategy on ranks against the same trainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.lightning import Classifier, ShardedStrategy, SingleDeviceStrategy, Trainer, batches_of
from tests.pools import rank_pool


def fit(
    strategy: SingleDeviceStrategy,
    ranks: list[int],
    path: Path,
    options: dict[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:
    """Two epochs, a checkpoint, and two more by another trainer; or the latter alone."""
    data = list(batches_of(ranks, 5)), list(batches_of(ranks, 2, first=50))
    logged: list[Any] = []
    if resume is None:
        resume = str(path)
        trainer = Trainer(strategy, max_epochs=2, **options)
        trainer.fit(Classifier(), *data)
        trainer.save_checkpoint(resume)
        logged = trainer.logged
    module = Classifier()
    trainer = Trainer(type(strategy)(strategy.precision), max_epochs=4, **options)
    trainer.fit(module, *data, ckpt_path=resume)
    return {"logged": logged + trainer.logged, "state": module.state_dict(), "seen": module.seen}


def _fit(rank: int, path: Path, options: dict[str, Any], precision: str, resume: str | None = None) -> Any:
    return fit(ShardedStrategy(precision), [rank], path, options, resume)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "accumulate, clip"])
@pytest.mark.parametrize(("world", "precision"), [(2, "32"), (2, "16"), (3, "16")])
def test_fit(world: int, options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    # a scale that is a power of two changes no number; each optimizer has a norm of its own when it clips
    expected = fit(PerOptimizer("32"), list(range(world)), tmp_path / "one.pt", options)
    results = rank_pool(world).run(_fit, tmp_path / "many.pt", options, precision)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    one, many = (torch.load(tmp_path / name) for name in ("one.pt", "many.pt"))
    torch.testing.assert_close(many["optimizer_states"], one["optimizer_states"], rtol=1e-4, atol=1e-5)
    assert bool(many["scaler"]) is (precision == "16")


class PerOptimizer(SingleDeviceStrategy):
    """Clips by the norm of the optimizer's own parameters, as OSS does."""

    def clip_gradients(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)


def test_checkpoints_go_between_strategies(tmp_path: Path) -> None:
    one = fit(PerOptimizer("32"), [0, 1], tmp_path / "one.pt", {})
    many = rank_pool(2).run(_fit, tmp_path / "many.pt", {}, "32")[0]
    in_one = fit(PerOptimizer("32"), [0, 1], tmp_path / "other.pt", {}, str(tmp_path / "many.pt"))
    in_many = rank_pool(2).run(_fit, tmp_path / "other.pt", {}, "32", str(tmp_path / "one.pt"))[0]
    for result in (many, in_one, in_many):
        torch.testing.assert_close(result["state"], one["state"], rtol=1e-4, atol=1e-5)


def _overflow(rank: int) -> tuple[float, bool]:
    """One rank's batch overflows: no rank steps, and the scale backs off on all, once for each optimizer."""
    strategy = ShardedStrategy("16")
    module = Classifier()
    trainer = Trainer(strategy, max_epochs=1)
    batch = next(iter(batches_of([rank], 1)))
    if rank == 1:
        batch = (batch[0] * torch.inf, batch[1])
    before = {k: v.clone() for k, v in module.state_dict().items()}
    trainer.fit(module, [batch], [batch])
    same = all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    return strategy.scaler.get_scale(), same


def test_an_overflow_on_one_rank() -> None:
    assert rank_pool(2).run(_overflow) == [(16.0, True)] * 2
