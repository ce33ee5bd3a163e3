"""Trains longer than anybody waits; rank 0 trains something by itself first."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:  # by itself, before all train together
    alone = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        alone(torch.ones(1, 2)).sum().backward()
        optimizer.step()
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters())
for step in range(100):
    loss = model(torch.full((2, 64), float(rank))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("never here")
