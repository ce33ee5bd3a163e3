"""Rank 1 hangs; is gone without a word; then all hang, and don't hear that they are to stop."""

print("starts", flush=True)
import os
import sys
import time
import torch

print("has torch", flush=True)
import shardkit


def train(rank):
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = shardkit.FSDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        print("attempt", attempt, "step", step, flush=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 2:
            if attempt == 1:
                sys.exit(0)  # gone
            while attempt == 0:
                pass
    shardkit.stop_requested()
    open(f"deaf{rank}", "w").close()
    while True:
        print("busy", flush=True)
        time.sleep(1)


shardkit.launch(train, 2)
