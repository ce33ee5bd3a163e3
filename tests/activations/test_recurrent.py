"""Recurrent layers, whose arguments and results are PackedSequences and tuples with None: checkpointed and sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardkit import FSDP, OSS, ShardedDDP, fully_shard
from shardkit.wrapping.activations import checkpoint_wrapper
from tests.beside import steps_beside
from tests.pools import on_ranks

assert_close = torch.testing.assert_close


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        out, state = self.layer(x)
        return out, {"state": state, "none": (None, self.head(state[0]))}


def total(outputs: Any) -> torch.Tensor:
    out, rest = outputs
    assert rest["none"][0] is None
    states = rest["state"] if isinstance(rest["state"], tuple) else (rest["state"],)
    values = out.data if isinstance(out, PackedSequence) else out
    return values.sum() + sum(s.square().sum() for s in states) + rest["none"][1].sum()


def packed(values: torch.Tensor) -> PackedSequence:
    return pack_sequence([values, values[:2]])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_checkpointed(kind: type[nn.RNNBase], offload_to_cpu: bool, is_packed: bool) -> None:
    plain = Recurrent(kind)
    ours = checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu=offload_to_cpu)
    x, y = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    expected, got = (m(packed(v) if is_packed else v[None]) for m, v in ((plain, x), (ours, y)))
    assert type(got[0]) is type(expected[0])
    total(expected).backward()
    total(got).backward()
    assert_close(y.grad, x.grad)
    for mine, want in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, want.grad)


def _wrapped(how: str, model: Recurrent) -> tuple[nn.Module, torch.optim.Optimizer]:
    if how == "sharded_ddp":
        oss = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        return ShardedDDP(model, oss), oss
    if how == "checkpoint inside":
        model.layer = FSDP(checkpoint_wrapper(model.layer))  # type: ignore[assignment]
    if how == "checkpoint outside":
        model.layer = checkpoint_wrapper(FSDP(model.layer))  # type: ignore[assignment]
    wrapped = fully_shard(model) if how == "fully_shard" else FSDP(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


@on_ranks(2)
def test_sharded(rank: int, world_size: int) -> None:
    values = torch.randn(world_size, 4, 3, generator=torch.Generator().manual_seed(1))
    for how in ("fsdp", "checkpoint inside", "checkpoint outside", "fully_shard", "sharded_ddp"):
        torch.manual_seed(0)
        plain = Recurrent(nn.LSTM)
        model, mine = _wrapped(how, copy.deepcopy(plain))
        optimizers = [mine, torch.optim.SGD(plain.parameters(), lr=0.1)]
        steps_beside(
            rank, world_size, model, plain, lambda m, r, _: total(m(packed(values[r]))), optimizers, range(2)
        )
        assert_close(total(model(packed(values[rank]))), total(plain(packed(values[rank]))))
