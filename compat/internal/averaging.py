"""Means over ranks of tensors, or of gradients that nothing else averages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from shardkit.backend import Group, ReduceOp

BUCKET_NUMEL = 2**23
T = TypeVar("T", bound=torch.Tensor)


def _buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yields the tensors of one dtype and device at a time, in lists of about BUCKET_NUMEL elements."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for t in tensors:
        bucket = kinds.setdefault((t.dtype, t.device), [])
        bucket.append(t)
        if sum(b.numel() for b in bucket) >= BUCKET_NUMEL:
            yield kinds.pop((t.dtype, t.device))
    yield from kinds.values()


@torch.no_grad()
def average_together(tensors: Iterable[torch.Tensor], group: Group, label: str) -> None:
    """Makes each tensor the mean over all ranks, in place; every rank calls it with the same shapes."""
    for bucket in _buckets(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        group.all_reduce(flat, op=ReduceOp.AVG, label=label)
        for t, new in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(new.view(t.shape))


@torch.no_grad()
def average_gradients(params: Iterable[torch.Tensor], group: Group) -> None:
    """Replaces gradients by their means over ranks.

    Those that some ranks have not count as zeros there; those that no rank has stay None.
    """
    for bucket in _buckets(params) if group.world_size > 1 else ():
        used = [p.grad is not None for p in bucket]
        rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        flat = torch.cat([*rows, torch.tensor(used).to(rows[0])])
        group.all_reduce(flat, op=ReduceOp.AVG, label="gradients")
        *means, shares = flat.split([*(p.numel() for p in bucket), len(bucket)])
        # what this rank has needs no look; but where ranks share a program, all of them look
        if group.backend.even_shards_only or not all(used):
            used = [share > 0 for share in shares.tolist()]
        for p, mean, some_rank_has_it in zip(bucket, means, used, strict=True):
            p.grad = mean.view_as(p).to(p.dtype) if some_rank_has_it else None
