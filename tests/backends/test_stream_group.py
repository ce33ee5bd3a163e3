"""Groups for libraries that run on a device's streams, over gloo: what they issue needs no such device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardkit.backend import DONE, get_backend
from shardkit.backends.c10d.stream_group import StreamGroup, StreamWork
from shardkit.errors import ConfigurationError
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


def _other_dtypes(rank: int) -> None:
    """What the library has no name for travels as bytes, complex numbers are added as pairs, the rest is refused."""
    group = StreamGroup(get_backend("gloo"), dist.group.WORLD, (0, 1), rank)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2, torch.complex64):
        own = torch.full((2,), rank + 1.0).to(dtype)
        gathered = torch.zeros(4).to(dtype)
        group.all_gather_into(gathered, own)
        assert gathered.to(torch.complex64).real.tolist() == [1, 1, 2, 2]
        exchanged = torch.zeros(2).to(dtype)
        group.all_to_all(exchanged, own)
        assert exchanged.to(torch.complex64).real.tolist() == [1, 2]
        sent = torch.full((3, 2), float(rank)).to(dtype).t()
        group.broadcast(sent, 1)
        assert sent.to(torch.complex64).real.unique().tolist() == [1]
        if dtype.is_complex:
            continue
        for call in (
            group.all_reduce,
            lambda t: group.reduce(t, 0),
            lambda t: group.reduce_scatter_into(t[:1], t),
        ):
            with pytest.raises(
                ConfigurationError, match=f"{dtype} is not possible on cpu: .* convert them to int32"
            ):
                call(own)
    uneven = torch.zeros(3, dtype=torch.int16)
    if rank == 0:  # gloo itself gathers even parts only
        parts = mock.Mock(wait=lambda: None)
        with mock.patch.object(group, "_start", lambda call, *args: parts.tensors(*args) and parts):
            group.all_gather_into(uneven, uneven[:1], [1, 2])
        (pieces,), _ = parts.tensors.call_args.args
        assert [(p.dtype, p.numel()) for p in pieces] == [(torch.uint8, 2), (torch.uint8, 4)]

    numbers = torch.full((2, 2), complex(1, rank))
    group.all_reduce(numbers)
    assert numbers.tolist() == [[complex(2, 1)] * 2] * 2
    group.reduce(numbers, 0)
    assert rank == 1 or numbers.tolist() == [[complex(4, 2)] * 2] * 2
    part = torch.zeros(1, dtype=torch.complex64)
    group.reduce_scatter_into(part, torch.full((2,), complex(rank, 1)))
    assert part.tolist() == [complex(1, 2)]


def test_other_dtypes() -> None:
    rank_pool(2).run(_other_dtypes)
