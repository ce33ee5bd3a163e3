"""A trainer that calls torch's fully_shard, on shardkit and on torch, beside one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.fsdp2_trainer import Job, Trainer, alone, plain
from tests.pools import DEVICE, run_once

JOBS = {
    "compiled, chunks of the loss": (2, Job(chunks=4, micro=2, compiled=True)),
    "recomputing, dimensions by name": (2, Job(selective=True, names_dims=True, micro=2)),
    "a registered strategy": (2, Job(registered=True, micro=2)),
    "replicas": (4, Job(replicas=2, names_dims=True, chunks=2)),
}


def trained(rank: int, job: Job, folder: str) -> dict[str, Any]:
    """Two steps on shardkit, two on torch from what was saved, and two more on shardkit."""
    import shardkit.torch_fsdp2

    losses, found = [], {}
    for phase in range(3):
        if phase != 1:
            shardkit.torch_fsdp2.install()
        try:
            # torch takes names of dimensions with parameters that are DTensors alone
            words = dataclasses.replace(job, names_dims=job.names_dims and phase != 1)
            trainer = Trainer(words, dict(plain().state_dict()))
            ours = type(trainer.model).__module__ == "tests.clients.fsdp2_trainer"
            assert ours == (phase != 1)
            if phase:
                trainer.load(f"{folder}/{phase - 1}")
            losses += [trainer.step(2 * phase + k) for k in range(2)]
            found = trainer.export()
            trainer.save(f"{folder}/{phase}")
        finally:
            shardkit.torch_fsdp2.uninstall()
    return {"losses": losses, "weights": found}


@pytest.mark.parametrize("name", JOBS)
def test_it_runs_unchanged(name: str, tmp_path: Path) -> None:
    world, job = JOBS[name]
    if DEVICE["name"] == "streams":  # torch.compile traces nothing while the device watches
        job = dataclasses.replace(job, compiled=False)
    losses, weights = alone(job, world, 6)
    # ranks of its own: install() refuses where a module of another test has kept torch's fully_shard
    for found in run_once(world, "gloo", trained, job, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["weights"], weights, rtol=0, atol=2e-5)
