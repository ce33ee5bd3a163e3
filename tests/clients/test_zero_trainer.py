"""The trainer in the manner of transformers 4.28 on ranks, resumed halfway, against itself in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.zero_trainer import Arguments, Classifier, Trainer
from tests.pools import rank_pool

STEPS = 4


def batch(step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return {
        "input_ids": torch.randint(11, (4, 5), generator=made),
        "labels": torch.randint(3, (4,), generator=made),
    }


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def train(args: Arguments, world: int, rank: int | None, folder: Path) -> dict[str, Any]:
    """Trains as one of the ranks, or (None) with all ranks' batches; goes on in another trainer halfway."""
    ranks = range(world) if rank is None else [rank]
    losses: list[float] = []
    for part in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        torch.manual_seed(0)
        trainer = Trainer(args, Classifier())
        if part.start:
            trainer.resume(folder)
        for step in part:
            batches = [joined([batch(step, r, k) for r in ranks]) for k in range(args.accumulation)]
            losses.append(trainer.step(batches))
        trainer.save(folder)
    logits = trainer.evaluate({"input_ids": batch(9, 0, 0)["input_ids"]})
    return {"losses": losses, "logits": logits, "state": trainer.full_state()}


def _rank(rank: int, args: Arguments, world: int, folder: str) -> dict[str, Any]:
    return train(args, world, rank, Path(folder))


CASES = [
    Arguments(frozenset({"simple"})),
    Arguments(frozenset({"simple"}), fp16=True, accumulation=2),
    Arguments(frozenset({"zero_dp_2"}), accumulation=2),
    Arguments(frozenset({"zero_dp_3"})),
    Arguments(frozenset({"zero_dp_3", "auto_wrap"}), accumulation=2),
    Arguments(frozenset({"zero_dp_3", "offload", "auto_wrap"})),
    Arguments(frozenset({"zero_dp_2", "auto_wrap"}), fp16=True),
]


def check(results: list[dict[str, Any]], args: Arguments, folder: Path) -> None:
    """Two ranks' results are those of one process, which writes into the folder."""
    is_simple = "simple" in args.sharded
    plain = dataclasses.replace(
        args, sharded=frozenset(), fp16=False, weight_decay=args.weight_decay * is_simple
    )
    truth = train(plain, 2, None, folder)
    close = {"rtol": 0.05, "atol": 0.02} if args.fp16 else {"rtol": 1e-4, "atol": 2e-5}
    mean = torch.tensor([r["losses"] for r in results]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(truth["losses"]), **close)
    for result in results:
        torch.testing.assert_close(result["logits"], truth["logits"], **close)
        torch.testing.assert_close(dict(result["state"]), dict(truth["state"]), **close)


@pytest.mark.parametrize("args", CASES, ids=lambda a: " ".join(sorted(a.sharded)) + " fp16" * a.fp16)
def test_trains_as_one_process(args: Arguments, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "alone").mkdir()
    results = rank_pool(2).run(_rank, args, 2, str(tmp_path / "ranks"))
    check(results, args, tmp_path / "alone")
