"""Groups for libraries that run on a device's streams, over gloo: what they issue needs no such device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardkit.backend import DONE, get_backend
from shardkit.backends.c10d.stream_group import StreamGroup, StreamWork
from tests.pools import rank_pool


def _collectives(rank: int) -> None:
    group = StreamGroup(get_backend("gloo"), dist.group.WORLD, (0, 1), rank)
    assert group.all_reduce(torch.empty(0)) is DONE

    gathered = torch.zeros(4)
    work = group.all_gather_into(gathered, torch.full((2,), float(rank)), async_op=True)
    assert isinstance(work, StreamWork)
    work.wait()
    assert work.is_done()
    assert gathered.tolist() == [0, 0, 1, 1]

    part = torch.zeros(2)
    group.reduce_scatter_into(part, torch.arange(4.0))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]

    exchanged = torch.zeros(2)
    group.all_to_all(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert exchanged.tolist() == [rank, 10 + rank]

    for total in (torch.ones(2, 3), torch.ones(3, 2).t()):  # the second can't travel as it is
        group.all_reduce(total)
        assert total.tolist() == [[2, 2, 2], [2, 2, 2]]
    sent = torch.full((3, 2), float(rank)).t()
    group.broadcast(sent, 1)
    assert sent.unique().tolist() == [1]
    reduced = torch.full((3, 2), rank + 1.0).t()
    group.reduce(reduced, 0)
    assert rank == 1 or reduced.unique().tolist() == [3]

    assert group.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert group.gather_object(rank, 1) == (None if rank == 0 else [0, 1])
    assert group.broadcast_object("a" if rank == 0 else None, 0) == "a"


def test_collectives_on_streams() -> None:
    rank_pool(2).run(_collectives)
