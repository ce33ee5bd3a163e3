"""Programs that would hang, or mix up bytes, between processes. Lines that are to be named end with a comment."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import shardkit


def branch_on_rank(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # here
    dist.barrier()  # there


def early_break(rank: int) -> None:
    model = DDP(nn.Linear(4, 4))
    for step in range(4):
        if rank == 1 and step == 2:
            break
        model(torch.ones(2, 4)).sum().backward()  # here
    dist.all_gather_object([None] * dist.get_world_size(), rank)  # there


def other_bucket_order(rank: int) -> None:
    gradients = [torch.ones(3), torch.ones(5)]
    for gradient in gradients if rank == 0 else reversed(gradients):
        dist.all_reduce(gradient)  # here there


def one_rank_fewer_batches(rank: int) -> None:
    data = DataLoader(TensorDataset(torch.ones(8 - 2 * (rank == 1), 4)), batch_size=2)
    model = shardkit.FSDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in data:
        model(batch).sum().backward()  # here there
        optimizer.step()


def barrier_on_rank_0_only(rank: int) -> None:
    dist.all_reduce(torch.ones(1))  # there
    if rank == 0:
        dist.barrier()  # here


def all_reduce_against_broadcast(rank: int) -> None:
    if rank == 0:
        dist.broadcast(torch.ones(3), 0)  # here
    else:
        dist.all_reduce(torch.ones(3))  # there


def evaluation_on_rank_0_only(rank: int) -> None:
    model = shardkit.FSDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))  # here
    dist.barrier()  # there


def save_on_rank_0_only(rank: int) -> None:
    model = shardkit.FSDP(nn.Linear(4, 4))
    if rank == 0:
        model.state_dict()  # here
    dist.barrier()  # there


def exception_on_one_rank(rank: int) -> None:
    if rank == 1:
        raise ValueError("a sample can't be read")  # here
    dist.all_reduce(torch.ones(1))  # there


def other_shapes(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))  # here there


def other_dtypes(rank: int) -> None:
    own = torch.ones(3) if rank == 0 else torch.ones(3, dtype=torch.float64)
    dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)  # here there


def send_without_recv(rank: int) -> None:
    dist.barrier()  # there
    if rank == 0:
        dist.send(torch.ones(3), 1)  # here


def new_group_on_some_ranks_only(rank: int) -> None:
    if rank < 2:
        dist.new_group([0, 1])  # here
    dist.barrier()  # there


def orders_of_two_groups(rank: int) -> None:
    one, two = dist.new_group(), dist.new_group()
    if rank == 0:
        dist.barrier(one)  # here
        dist.barrier(two)
    else:
        dist.barrier(two)  # there
        dist.barrier(one)


def key_that_nobody_sets(rank: int) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.get("the address")  # here
    dist.barrier()  # there
