"""FSDP's ranks issue gathers and reductions in one order, whatever single ranks use or reach."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import FSDP, ReshardPolicy
from shardkit.backends.simulated import SimulatedGroup
from shardkit.wrapping.activations import checkpoint_wrapper
from tests.beside import assert_same, steps_beside
from tests.pools import rank_pool
from tests.programs.running import examples

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

SMALL, LARGE = 3, 96  # units that travel together, and each alone
CHECKPOINTS = ("", "torch", "reentrant", "own")


@dataclass(frozen=True)
class Chain:
    """Blocks in a row, and what single ranks do differently.

    Attributes:
        blocks: "plain", "optional" (its second layer may be left out) or "frozen".
        spans: (first, end, kind): blocks whose activations are computed anew together.
        cuts: (rank, block): that rank's block takes its input without a graph.
        skips: (rank, block): that rank leaves out the block's second layer.
        forwards: how many forwards one backward goes through.
        width: of each layer.
    """

    blocks: tuple[str, ...]
    spans: tuple[tuple[int, int, str], ...] = ()
    cuts: frozenset[tuple[int, int]] = frozenset()
    skips: frozenset[tuple[int, int]] = frozenset()
    forwards: int = 1
    prefetch: int = 1
    reshard: bool = True
    width: int = LARGE


class Block(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width) if kind == "optional" else None
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, skip: bool, cut: bool) -> torch.Tensor:
        x = x.detach() if cut else x
        y = torch.tanh(self.first(x))
        return y if self.second is None or skip else x + self.second(y)


class Blocks(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        self.stem, self.head = nn.Linear(chain.width, chain.width), nn.Linear(chain.width, 1)
        self.blocks = nn.ModuleList(Block(kind, chain.width) for kind in chain.blocks)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.stem(x)
        done = 0
        for first, end, kind in self.chain.spans:
            x = self._run(done, first, rank, x)
            if kind == "torch":
                x = checkpoint(self._run, first, end, rank, x, use_reentrant=False)
            elif kind == "reentrant":
                x = checkpoint(self._run, first, end, rank, x, use_reentrant=True)
            else:
                x = self._run(first, end, rank, x)
            done = end
        return self.head(self._run(done, len(self.blocks), rank, x))

    def _run(self, first: int, end: int, rank: int, x: torch.Tensor) -> torch.Tensor:
        for i in range(first, end):
            x = self.blocks[i](x, (rank, i) in self.chain.skips, (rank, i) in self.chain.cuts)
        return x


def build(chain: Chain) -> Blocks:
    torch.manual_seed(3)
    return Blocks(chain).double()


def shard(model: Blocks) -> FSDP:
    policy = ReshardPolicy(after_forward=model.chain.reshard, prefetch=model.chain.prefetch)
    own = {i for first, end, kind in model.chain.spans if kind == "own" for i in range(first, end)}
    for i, block in enumerate(model.blocks):
        unit = FSDP(block, reshard=policy)
        model.blocks[i] = checkpoint_wrapper(unit) if i in own else unit
    return FSDP(model, reshard=policy)


def loss_of(chain: Chain, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for k in range(chain.forwards):
        generator = torch.Generator().manual_seed(100 * step + 10 * k + rank)
        x = torch.randn(2, chain.width, generator=generator, dtype=torch.float64)
        total = total + model(x, rank).pow(2).mean()
    return total


def train(rank: int, world_size: int, chains: list[Chain]) -> None:
    for chain in chains:
        plain, model = build(chain), shard(build(chain))
        steps_beside(rank, world_size, model, plain, partial(loss_of, chain), steps=range(2))
        assert_same(model, plain, str(chain), rtol=1e-7, atol=1e-7)


class Issued:
    """Inside, what simulated ranks issue for gathers and reductions, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_rank: dict[int, list[tuple[str, str]]] = defaultdict(list)
        issue = SimulatedGroup._issue

        def noting(group: SimulatedGroup, operation: str, numel: int, label: str, *rest: Any) -> Any:
            if operation in ("all_gather_into", "reduce_scatter_into"):
                self.by_rank[group.rank].append((operation, label))
            return issue(group, operation, numel, label, *rest)

        monkeypatch.setattr(SimulatedGroup, "_issue", noting)


@st.composite
def chains(draw: st.DrawFn, world_size: int, most: int = 8) -> Chain:
    count = draw(st.integers(2, most))
    blocks = draw(st.tuples(*[st.sampled_from(["plain", "plain", "optional", "frozen"])] * count))
    spans, at = [], 0
    while at < count:
        end = draw(st.integers(at + 1, count))
        kind = draw(st.sampled_from(CHECKPOINTS))
        if kind == "reentrant" and "frozen" in blocks[at:end]:
            kind = "own"  # torch's refuses a backward that leads to nothing
        if kind:
            spans.append((at, end, kind))
        at = end
    # one backward through several re-entrant checkpoints of a parameter completes it several times: not promised
    nests = any(kind in ("reentrant", "own") for *_, kind in spans)
    places = st.tuples(st.integers(0, world_size - 1), st.integers(0, count - 1))
    cuts = draw(st.frozensets(places, max_size=3))
    if nests:  # torch's passes by what takes no gradient, and what our own puts out always takes one
        cuts = frozenset(cut for cut in cuts if blocks[cut[1]] != "frozen")
    return Chain(
        blocks,
        tuple(spans),
        cuts,
        draw(st.frozensets(places, max_size=3)),
        1 if nests else draw(st.sampled_from([1, 1, 1, 2])),
        draw(st.sampled_from([1, 1, 0, 2])),
        draw(st.booleans()),
        draw(st.sampled_from([SMALL, LARGE])),
    )


def check(world_size: int, chain: Chain) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        issued = Issued(monkeypatch)
        # with several forwards, only devices need one order of gathers and reductions: see [Note: several forwards]
        device = "simulated" if chain.forwards == 1 else "streams"
        rank_pool(world_size, device).run(train, world_size, [chain])
        if chain.forwards == 1:
            first, *others = (issued.by_rank[r] for r in range(world_size))
            for other in others:
                assert other == first


@examples(80)
@given(chains(2))
@example(Chain(("plain",) * 8, cuts=frozenset({(0, 7)})))
@example(Chain(("plain",) * 8, ((2, 5, "torch"), (5, 8, "reentrant")), frozenset({(0, 7)})))
@example(Chain(("plain",) * 8, ((0, 8, "own"),), frozenset({(1, 6)})))
@example(Chain(("plain", "frozen", "plain", "frozen", "plain"), cuts=frozenset({(0, 2), (1, 3)})))
@example(Chain(("optional",) * 6, skips=frozenset({(0, 5), (1, 3)})))
@example(Chain(("optional",) * 6, skips=frozenset({(0, 5)}), cuts=frozenset({(1, 3)}), forwards=2))
def test_two_ranks(chain: Chain) -> None:
    check(2, chain)


@examples(30)
@given(chains(3, 6))
def test_three_ranks(chain: Chain) -> None:
    check(3, chain)


def test_several_forwards_on_processes() -> None:
    skips = frozenset({(0, 5), (1, 1)})
    cases = [
        Chain(("optional",) * 6, cuts=frozenset({(1, cut)}), skips=skips, forwards=2) for cut in range(6)
    ]
    rank_pool(2).run(train, 2, cases)
