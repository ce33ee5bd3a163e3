"""Sequences of torch.distributed's collectives that are drawn, and what each rank has afterwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

OPERATIONS = (
    "all_reduce", "avg", "product", "max", "coalesced", "broadcast", "reduce", "all_gather", "all_gather_into",
    "reduce_scatter", "gather", "scatter", "all_to_all", "all_to_all_single", "objects", "pairs", "groups", "barrier",
    "functional",
)  # fmt: skip


def values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Sums of them depend on the order."""
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    scale = 10.0 ** torch.randint(-3, 4, shape, generator=drawn)
    numbers = torch.randn(shape, generator=drawn) * scale
    return numbers.to(dtype) if dtype.is_floating_point else (numbers.abs() % 50).to(dtype)


def run(rank: int, calls: list[tuple[str, int, str, bool]]) -> list[Any]:
    """One result a call."""
    return [_call(rank, k, *call) for k, call in enumerate(calls)]


def _call(rank: int, seed: int, operation: str, numel: int, dtype_name: str, async_op: bool) -> Any:
    dtype, world = getattr(torch, dtype_name), dist.get_world_size()
    own = values(seed, rank, (numel,), dtype)
    root = seed % world

    def done(work: Any) -> None:
        if work is not None:
            work.wait()

    if operation in ("all_reduce", "avg", "product", "max"):
        op = {"all_reduce": "SUM", "avg": "SUM", "product": "PRODUCT", "max": "MAX"}[operation]
        if operation == "avg" and dtype.is_floating_point and hasattr(dist.ReduceOp, "AVG"):
            op = "AVG"
        done(dist.all_reduce(own, getattr(dist.ReduceOp, op), async_op=async_op))
        return own
    if operation == "coalesced":
        parts = [own, values(seed + 50, rank, (3,), dtype)]
        dist.group.WORLD.allreduce_coalesced(parts, dist.AllreduceCoalescedOptions()).wait()
        return parts
    if operation == "broadcast":
        done(dist.broadcast(own, root, async_op=async_op))
        return own
    if operation == "reduce":
        done(dist.reduce(own, root, async_op=async_op))
        return own if rank == root else None
    if operation == "all_gather":
        pieces = [torch.empty_like(own) for _ in range(world)]
        done(dist.all_gather(pieces, own, async_op=async_op))
        return pieces
    if operation == "all_gather_into":
        whole = torch.empty(world * numel, dtype=dtype)
        done(dist.all_gather_into_tensor(whole, own, async_op=async_op))
        return whole
    if operation == "reduce_scatter":
        part = torch.empty(numel, dtype=dtype)
        done(dist.reduce_scatter_tensor(part, values(seed, rank, (world * numel,), dtype), async_op=async_op))
        return part
    if operation == "gather":
        pieces = [torch.empty_like(own) for _ in range(world)]
        dist.gather(own, pieces if rank == root else None, dst=root)
        return pieces if rank == root else None
    if operation == "scatter":
        pieces = [own + i for i in range(world)]
        into = torch.empty_like(own)
        dist.scatter(into, pieces if rank == root else None, src=root)
        return into
    if operation == "all_to_all":
        sent = [values(seed + i, rank, (i + rank + 1,), dtype) for i in range(world)]
        come = [torch.empty(i + rank + 1, dtype=dtype) for i in range(world)]
        # gloo has no all_to_all of lists: the same with one tensor
        whole = torch.empty(sum(t.numel() for t in come), dtype=dtype)
        sizes = [t.numel() for t in come], [t.numel() for t in sent]
        dist.all_to_all_single(whole, torch.cat(sent), *sizes)
        return whole
    if operation == "all_to_all_single":
        whole = torch.empty(world, numel, dtype=dtype)
        dist.all_to_all_single(whole, values(seed, rank, (world, numel), dtype))
        return whole
    if operation == "objects":
        found: list[Any] = [None] * world
        dist.all_gather_object(found, {"rank": rank, "numel": numel})
        told = [rank, numel] if rank == root else [None, None]
        dist.broadcast_object_list(told, src=root)
        return found, told
    if operation == "pairs":
        into = torch.empty_like(own)
        works = [
            dist.isend(own, (rank + 1) % world, tag=seed),
            dist.irecv(into, (rank - 1) % world, tag=seed),
        ]
        for work in works:
            work.wait()
        return into
    if operation == "groups":
        halves = [
            dist.new_group(ranks) for ranks in (range(world // 2), range(world // 2, world)) if len(ranks)
        ]
        mine = next(g for g in halves if g is not dist.GroupMember.NON_GROUP_MEMBER)
        dist.all_reduce(own, group=mine)
        dist.destroy_process_group(mine)
        return own, dist.get_backend()
    if operation == "functional":
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(own, "sum", dist.group.WORLD) + 0
    dist.barrier()
    return None
