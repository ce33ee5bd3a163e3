"""Trains five steps, in which rank 1 is late in the second layer."""

import time
import torch
import shardkit


def main(rank):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        shardkit.fully_shard(layer)
    shardkit.fully_shard(model)
    if rank == 1:
        model[1].register_forward_pre_hook(lambda *_: time.sleep(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main(torch.distributed.get_rank())
    torch.distributed.destroy_process_group()
