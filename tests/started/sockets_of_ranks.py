"""Prints how many sockets each rank of a training has, by world size."""

import os
import sys
import torch
import torch.distributed as dist
from torch import nn
import shardkit.fsdp
import torch._dynamo  # which optimizers import: once here, not in each of the forks

torch.set_num_threads(1)
sizes, path = [int(n) for n in sys.argv[1].split(",")], sys.argv[2]


def sockets():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return sum(link.startswith("socket") for link in links)


def main(rank, W):
    before = sockets()
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}{W}", W), rank=rank, world_size=W)
    parts = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)]
    model = shardkit.FSDP(nn.Sequential(*[shardkit.FSDP(m) for m in parts]))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    print(f"of {W}: {sockets() - before}", flush=True)
    dist.barrier()


for W in sizes:
    for rank in range(W):
        if os.fork() == 0:
            try:
                main(rank, W)
            finally:
                os._exit(0)
    for rank in range(W):
        os.wait()
