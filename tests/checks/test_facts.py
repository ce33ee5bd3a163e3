"""What ranks tell each other about names, shapes and options is data, and read as data."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import get_backend
from shardkit.checks import all_gather_facts, all_gather_facts_or_objects, decode, encode
from shardkit.errors import BackendError, ConfigurationError, RankMismatchError
from tests.pools import on_ranks

FACTS: list[Any] = [
    None, True, False, 0, -(2**80), 1.5, math.inf, 0.1 + 0.2, "", "é\ud800\0", b"", b"\xff\x00", (), [], {},
    (1, [2, (3,)], {"a": {1: None, (1, "b"): b"x"}}), ["tuple", 1], ("list",), {"tuple": ["dict"]},
    torch.float16, [("weight", (3, 5), "torch.float32", torch.bfloat16)],
]  # fmt: skip


def test_facts_arrive_as_they_are() -> None:
    for fact in FACTS:
        got = decode(encode(fact))
        assert got == fact
        assert type(got) is type(fact)
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(torch.Size([2, 3]))) == (2, 3)


@pytest.mark.parametrize("value", [torch.ones(1), print, object(), {1, 2}, 1j, nn.Linear, [nn.ReLU()]])
def test_anything_else_is_no_fact(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no fact"):
        encode(value)


class Calls:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_what_is_sent_instead_is_refused() -> None:
    draw = random.Random(0)
    forged = [b"", pickle.dumps(Calls()), b"{}", b'["set",1]', b'["dtype","x"]', b'["bytes","x"]', b"[" * 100_000,
              b"[]", b'["dict",[["list"],1]]', b'{"a":1}', b'["dtype",[]]', b'["bytes"]', b'["dict",1]']  # fmt: skip
    whole = encode(FACTS[15])
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        forged.append(bytes(data))
    for data in forged:
        try:
            assert encode(decode(data))
        except BackendError:
            continue
    for data in forged[:9]:
        with pytest.raises(BackendError, match="no fact"):
            decode(data)


@on_ranks(*[(ranks, backend) for ranks in (2, 3) for backend in ("gloo", "simulated")])
def test_ranks_exchange_facts_without_pickles(rank: int, backend: str) -> None:
    group = get_backend(backend).group()
    world = group.world_size

    def no_pickle(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickled")

    loads = pickle.loads
    if backend == "gloo":  # the ranks are processes of their own
        pickle.loads = no_pickle  # type: ignore[assignment]
    try:
        sent = [b"" if r == 1 else bytes([r]) * (r * 70_000) for r in range(world)]
        assert group.all_gather_bytes(sent[rank], label="x") == sent
        assert all_gather_facts(group, (rank, "a" * rank), label="x") == [(r, "a" * r) for r in range(world)]
        assert all_gather_facts_or_objects(group, {"a": rank}) == [{"a": r} for r in range(world)]
        model = nn.Linear(2, 2 + rank)
        with pytest.raises(RankMismatchError):
            shardkit.OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1, backend=backend)
        if backend == "gloo":
            with pytest.raises(RankMismatchError):
                shardkit.FSDP(nn.Linear(2, 2 + rank))
    finally:
        pickle.loads = loads
    mine = {"a": {1}} if rank == 0 else {"a": rank}
    assert all_gather_facts_or_objects(group, mine) == [{"a": {1} if r == 0 else r} for r in range(world)]


@on_ranks(2)
def test_a_pickle_that_a_rank_sends_is_not_run(rank: int) -> None:
    group = get_backend("gloo").group()
    if rank == 0:
        group.all_gather_bytes(pickle.dumps(Calls()), label="check of facts")
        return
    with pytest.raises(BackendError, match="no fact"):
        all_gather_facts(group, json.loads("1"), label="check of facts")
