"""Rank 1 raises, dies in the next attempt, and is left out in the third."""

import os
import signal
from pathlib import Path
import torch
import torch.distributed as dist
import shardkit
from shardkit.launching.run_folder import note_checkpoints


def complete_steps():
    return sorted(int(p.name[5:]) for p in Path("saved").glob("step-*"))


def save(step, rank):
    dist.barrier()
    if rank == 0:
        note_checkpoints("saved")
        Path(f"saved/step-{step:08}").mkdir(parents=True)
        Path(f"saved/step-{step:08}/shardkit.json").write_text("{}")
    dist.barrier()


def train(rank):
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world_size = dist.get_world_size()
    print("attempt", attempt, "of", world_size, "ranks from", complete_steps(), flush=True)
    model = shardkit.FSDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        model(torch.ones(2, 4)).sum().backward()
        if rank == 1 and attempt < 3 and step == 3:
            if attempt == 0:
                raise KeyError("what went wrong")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if attempt == 0 and step == 2:
            save(step, rank)


shardkit.launch(train, int(os.environ["WORLD_SIZE"]))
