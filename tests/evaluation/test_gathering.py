"""Tensors of uneven length and structures of them, on ranks of several backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardkit
from shardkit.backend import get_backend
from shardkit.errors import RankFailedError
from tests.backends.environments import environments
from tests.pools import on_ranks, rank_pool

EACH = [p for p in environments("gloo", "simulated", "xla") if p.values[1] in (2, 3)]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


def _of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    shape = [(0, 3), (2, 3), (5, 1, 2)][rank]
    return (torch.arange(torch.Size(shape).numel()) % 2 + rank).view(shape).to(dtype)


@on_ranks(*EACH)
def test_uneven_tensors(rank: int, world_size: int, backend: str) -> list[list[torch.Tensor]]:
    device = get_backend(backend).device()
    found = []
    for dtype in DTYPES:
        if backend == "xla" and dtype is torch.float64:
            continue
        everybody = shardkit.gather_tensors(_of_rank(rank, dtype).to(device), backend=backend)
        for r, value in enumerate(everybody):
            assert torch.equal(value.cpu(), _of_rank(r, dtype))
            assert value.dtype is dtype
    scalars = shardkit.gather_tensors(torch.tensor(float(rank)).to(device), backend=backend)
    assert [s.item() for s in scalars] == list(range(world_size))
    empty = shardkit.gather_tensors(torch.empty(0, 2).to(device), backend=backend)
    assert [e.shape for e in empty] == [(0, 2)] * world_size
    return found


@on_ranks(*[p for p in EACH if p.values[0] != "simulated"])
def test_structures_are_pickled_only_if_need_be(rank: int, world_size: int, backend: str) -> Any:
    device = get_backend(backend).device()
    pickled = []
    group = type(get_backend(backend).group().channel("control"))
    plain = group.all_gather_object

    def counted(self: Any, obj: Any, *, label: str = "") -> list[Any]:
        if label == "gather":
            pickled.append(obj)
        return plain(self, obj, label=label)

    group.all_gather_object = counted
    try:
        mine = {
            "scores": torch.ones(rank + 1).to(device) * rank,
            "count": rank + 1,
            "loss": rank / 3,
            "ok": rank > 0,
        }
        for r, theirs in enumerate(shardkit.gather(mine, backend=backend)):
            assert torch.equal(theirs["scores"].cpu(), torch.ones(r + 1) * r)
            assert (theirs["count"], theirs["loss"], theirs["ok"]) == (r + 1, r / 3, r > 0)
        assert not pickled
        names = shardkit.gather(("rank", [rank] * rank), backend=backend)
        assert names == [("rank", [r] * r) for r in range(world_size)]
        large = shardkit.gather(2**70 if rank else 1, backend=backend)
        assert large == [1] + [2**70] * (world_size - 1)
    finally:
        group.all_gather_object = plain


def _other_dtype(rank: int) -> None:
    shardkit.gather_tensors(torch.zeros(2, dtype=torch.float32 if rank else torch.int64))


def test_dtypes_have_to_agree() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 has torch.float32, rank 0 has torch.int64"):
        rank_pool(2).run(_other_dtype)
    with pytest.raises(RankFailedError, match="dtype that collectives do not carry"):
        rank_pool(2).run(_complex)


def _complex(rank: int) -> None:
    shardkit.gather_tensors(torch.zeros(2, dtype=torch.complex64 if rank else torch.float32))
