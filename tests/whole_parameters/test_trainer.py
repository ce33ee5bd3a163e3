"""transformers' Trainer with several optimizers under one name: trained, saved and resumed as in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit import WholeParameters
from tests.pools import free_port, rank_pool

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.border.test_libraries import Environment, llama
from tests.integrations.test_huggingface import close, results_of, trainer_of


def with_rules(trainer: Any) -> Any:
    """Matrices of the layers are updated as a whole; the head is tied to the embedding."""
    layers = (lambda name, p: p.ndim == 2 and "layers" in name, torch.optim.Adafactor, {"lr": 0.02})
    rest = (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-2})
    trainer.optimizer = WholeParameters(trainer.model, [layers], rest=rest)
    return trainer


def on_rank(rank: int, port: int, folder: Path) -> Any:
    from shardkit.integrations.huggingface import ShardkitPlugin

    with Environment(rank, port):
        trainer = trainer_of(llama(tie_word_embeddings=True), folder, dist.get_world_size())
        ShardkitPlugin().attach(trainer)
        results = results_of(with_rules(trainer), None)
        dist.barrier()
        return results


def in_one_process(folder: Path, resume: Path | None) -> Any:
    before = dict(os.environ)
    try:
        return results_of(with_rules(trainer_of(llama(tie_word_embeddings=True), folder, 1)), resume)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_trainer(tmp_path: Path) -> None:
    truth = in_one_process(tmp_path / "one", None)
    for found in rank_pool(2).run(on_rank, free_port(), tmp_path / "ranks"):
        close(found, truth)
    resumed = in_one_process(tmp_path / "resumed", tmp_path / "ranks" / "checkpoint-2")
    torch.testing.assert_close(dict(resumed["state"]), dict(truth["state"]), rtol=0, atol=1e-6)
