"""A training that survives what happens to jobs: put your own model and data into the first two functions.

shardkit run --ranks 4 --restarts 3 --min-ranks 2 examples/train_anything.py --checkpoints saved
shardkit run --ranks 8 --nodes 1:3 --rdzv node0:29400 --id job17 --restarts 3 train_anything.py   # on each machine

Killed, out of memory, on fewer machines than before: the same line goes on from the last checkpoint, every sample once.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shardkit
from shardkit.types import Kwargs


def build_model(width: int = 64) -> nn.Module:
    """Here: two layers of a transformer that reads sequences of numbers, and says which kind they are."""
    layer = nn.TransformerEncoderLayer(
        width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )
    return nn.Sequential(
        nn.Linear(1, width),
        nn.TransformerEncoder(layer, num_layers=2),
        nn.Flatten(),
        nn.Linear(16 * width, 3),
    )


def build_data() -> Dataset[tuple[torch.Tensor, ...]]:
    """Here: sines of three frequencies, with noise; all ranks make the same ones."""
    numbers = torch.Generator().manual_seed(0)
    kinds = torch.randint(3, (2400,), generator=numbers)
    waves = torch.sin(torch.arange(16.0) * (kinds[:, None] + 1) / 3)
    return TensorDataset((waves + torch.randn(waves.shape, generator=numbers))[..., None], kinds)


def train(rank: int, options: argparse.Namespace) -> float:
    """Runs on every rank; the last loss."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = build_model().to(device)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            shardkit.fully_shard(module)
    shardkit.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.epochs * 50)
    skip = shardkit.SkipOutOfMemory(model)
    size, workers = options.batch, options.workers
    loader = shardkit.ResumableLoader(build_data(), global_batch_size=size, num_workers=workers)

    step, value = 0, float("nan")
    state: Kwargs = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    if shardkit.latest(options.checkpoints):  # after a restart, or in a new job: on any number of ranks
        step = shardkit.restore_training(options.checkpoints, **state).step
        if rank == 0:
            print(f"goes on from step {step}, epoch {loader.epoch}")
    for epoch in range(loader.epoch, options.epochs):
        for inputs, targets in loader:
            with skip:  # a batch that is too large for one rank's memory is skipped by all
                loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()
            if not skip.skipped:
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % options.save_every == 0:
                shardkit.save_training(options.checkpoints, step=step, keep=3, async_=True, **state)
            if shardkit.stop_requested():  # SIGTERM: the same step on all ranks
                shardkit.save_training(options.checkpoints, step=step, keep=3, **state)
                sys.exit(75)
            if rank == 0 and step % 20 == 0 and not skip.skipped:
                value = loss.item()
                print(f"epoch {epoch}, step {step}: loss {value:.4f} on rank 0's samples")
    shardkit.save_training(options.checkpoints, step=step, keep=3, **state)
    return value


def main() -> None:
    """Reads options; ``shardkit run`` has started the ranks, or there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", default="saved")
    for name, value in {"epochs": 3, "batch": 48, "save-every": 20, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)  # a batch is of all ranks
    shardkit.launch(train, int(os.environ.get("WORLD_SIZE", "1")), args=(parser.parse_args(),))


if __name__ == "__main__":
    main()
