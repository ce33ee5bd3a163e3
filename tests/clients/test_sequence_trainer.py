"""The fairseq-style trainer on ranks against itself in one process: losses, norms, parameters, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.sequence_trainer import Config, Trainer, consolidate, wrapped_by_size
from tests.pools import rank_pool


def samples_of(step: int, rank: int, config: Config) -> list[torch.Tensor]:
    """Sentences of other lengths on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        torch.randint(config.vocabulary, (2, 5 + rank + k), generator=generator)
        for k in range(config.update_freq)
    ]


def samples_of_all(step: int, world: int, config: Config) -> list[torch.Tensor]:
    return [sample for rank in range(world) for sample in samples_of(step, rank, config)]


def run(rank: int, config: Config, folder: str, steps: int) -> dict[str, Any]:
    trainer = Trainer(config)
    stats = [trainer.train_step(samples_of(step, rank, config)) for step in range(2)]
    trainer.save_checkpoint(folder)
    resumed = Trainer(config)
    resumed.load_checkpoint(folder)
    assert resumed.num_updates == 2
    stats += [resumed.train_step(samples_of(step, rank, config)) for step in range(2, steps)]
    valid = resumed.valid_step(samples_of(50, 0, config)[0])
    with resumed.full_parameters() as model:
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"stats": stats, "valid": valid, "parameters": parameters}


def alone(config: Config, world: int, steps: int) -> dict[str, Any]:
    trainer = Trainer(dataclasses.replace(config, ddp_backend="none", fp16=False, bf16=False))
    stats = [trainer.train_step(samples_of_all(step, world, config)) for step in range(steps)]
    parameters = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return {
        "stats": stats,
        "valid": trainer.valid_step(samples_of(50, 0, config)[0]),
        "parameters": parameters,
    }


def check(results: list[dict[str, Any]], config: Config, steps: int) -> None:
    """Two ranks' results are those of one process."""
    expected = alone(config, 2, steps)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-5)


CONFIGS = [
    Config(),
    Config(no_reshard_after_forward=True, checkpoint_activations=False),
    Config(flatten_parameters=False),
    Config(use_sharded_state=True, update_freq=1),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_full_precision(number: int, tmp_path: Path) -> None:
    config = CONFIGS[number]
    check(rank_pool(2).run(run, config, str(tmp_path), 4), config, 4)
    if config.use_sharded_state:
        whole = consolidate(str(tmp_path), 2)
        trainer = Trainer(dataclasses.replace(config, ddp_backend="none"))
        for step in range(2):
            trainer.train_step(samples_of_all(step, 2, config))
        torch.testing.assert_close(dict(whole), dict(trainer.model.state_dict()), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mixed_precision(dtype: str, tmp_path: Path) -> None:
    config = Config(**{dtype: True}, fp32_reduce_scatter=True)  # type: ignore[arg-type]
    expected = alone(config, 2, 4)
    for result in rank_pool(2).run(run, config, str(tmp_path), 4):
        close = 0.02 if dtype == "fp16" else 0.1
        for own, other in zip(result["stats"], expected["stats"], strict=True):
            assert own == pytest.approx(other, rel=close)
        assert all(p.dtype == torch.float32 for p in result["parameters"].values())


def _other_size(rank: int, config: Config, folder: str) -> dict[str, torch.Tensor]:
    trainer = Trainer(config)
    trainer.load_checkpoint(folder)
    trainer.train_step(samples_of_all(2, 2, config)[rank : rank + 2])
    with trainer.full_parameters() as model:
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    config = Config()
    rank_pool(2).run(run, config, str(tmp_path), 2)
    results = rank_pool(3).run(_other_size, config, str(tmp_path))
    trainer = Trainer(dataclasses.replace(config, ddp_backend="none"))
    for step in range(2):
        trainer.train_step(samples_of_all(step, 2, config))
    everything = samples_of_all(2, 2, config)
    trainer.train_step([s for rank in range(3) for s in everything[rank : rank + 2]])
    for result in results:
        torch.testing.assert_close(
            result, {n: p.detach() for n, p in trainer.model.named_parameters()}, rtol=1e-4, atol=2e-5
        )


def _by_size(rank: int, config: Config) -> torch.Tensor:
    logits: torch.Tensor = wrapped_by_size(config)(samples_of(0, 0, config)[0])
    return logits.detach()


def test_wrapped_by_a_policy() -> None:
    config = Config()
    expected = Trainer(dataclasses.replace(config, ddp_backend="none")).model(samples_of(0, 0, config)[0])
    for logits in rank_pool(2).run(_by_size, config):
        torch.testing.assert_close(logits, expected.detach())
