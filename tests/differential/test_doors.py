"""Drawn training loops through every door beside the same loop in one process.

A loop has what users' loops have: several roots in any order, weights tied across units and averaged copies, steps that
are skipped for a NaN, micro-batches in half precision, decay by dimensions, layers that sit out, integer parameters. A
rank may call the roots in another order: that is refused on all.
"""

from __future__ import annotations

import contextlib
import copy
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardkit import (
    FSDP,
    OSS,
    PrecisionPolicy,
    ReducePolicy,
    ReshardPolicy,
    ShardedDDP,
    fully_shard,
    sharding_of,
)
from shardkit.errors import OutOfStepError
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP
from shardkit.torch_fsdp import MixedPrecision, ShardingStrategy
from tests.differential.keeping import kept
from tests.pools import rank_pool
from tests.programs.running import examples
from tests.programs.spec import Short

LISTS_ROWS = ("unflattened", "fully_shard", "dtensors", "sharded_ddp")  # under the parameters' names
RESUMES = ("fsdp", "unflattened", "fully_shard")
DOORS = (*RESUMES, "torch_fsdp", "torch_fsdp_orig", "sharded_ddp")
NARROW = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Turn(Short):
    """One step of a loop.

    Attributes:
        to_none: how gradients are cleared before it.
        spares: which ranks use the spare layer: "all", "none", or "some" (every second, others for the next root).
        micros: backwards, but for the last one under no_sync.
        nan: whose loss is NaN: "nobody", "all" or "some" (the first).
        turned: roots are called from the last to the first.
    """

    to_none: bool = True
    spares: str = "all"
    micros: int = 1
    nan: str = "nobody"
    turned: bool = False


@dataclass(frozen=True, repr=False)
class Loop(Short):
    """A training loop.

    Attributes:
        traits: see where they are asked for.
        later: number of ranks that go on after the second step; 0: the same.
        apart: step in which the last rank calls the roots in another order; -1: none.
    """

    door: str
    ranks: int
    sizes: tuple[int, int, int]
    traits: tuple[str, ...]
    turns: tuple[Turn, ...]
    roots: int = 1
    later: int = 0
    apart: int = -1


class Drawn(nn.Module):
    """A model with the traits that are named."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        (width, hidden, vocabulary), traits = loop.sizes, loop.traits
        self.words = nn.Embedding(vocabulary, width)
        times = 2000 if "large" in traits else 1  # units that are not sent together with others
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, n), nn.Tanh(), nn.Linear(n, width))
                for n in (hidden * times, times)
            ]
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.low, self.rank = nn.Parameter(torch.randn(2, 1, width)), nn.Parameter(torch.empty(0, width))
        self.offsets = nn.Parameter(torch.zeros(width, dtype=torch.long), requires_grad=False)
        self.spare = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        if "half" not in traits:
            self.double()
        self.is_mixed = "mixed" in traits
        if self.is_mixed:
            self.spare.float()
        if "frozen" in traits:
            self.blocks[0][0].requires_grad_(False)  # type: ignore[index]
        if "tied" in traits:
            self.blocks[1][2].bias = self.blocks[0][2].bias  # type: ignore[index]
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, spares: bool) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = torch.where(self.mask, x * self.scale + self.low.sum((0, 1)), x) + self.offsets + self.rank.sum()
        if spares:
            x = x + self.spare(x.float() if self.is_mixed else x)
        return self.head(x)


def sharded(loop: Loop, model: Drawn) -> Any:
    """A root, with its blocks as units."""
    traits, half = loop.traits, "half" in loop.traits
    keeps = "keeps" in traits
    policy: dict[str, Any] = {"reshard": ReshardPolicy(after_forward=not keeps)}
    if loop.door in ("fully_shard", "dtensors"):
        if half:
            policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=NARROW, reduce_dtype=torch.float32)
        is_aligned = "aligned" in traits and loop.door == "fully_shard"
        by: Any = partial(
            fully_shard, dtensors=loop.door == "dtensors", align=2 if is_aligned else None, **policy
        )
    elif loop.door.startswith("torch_fsdp"):
        strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
        precision = MixedPrecision(NARROW, torch.float32) if half else None
        orig = loop.door.endswith("orig")
        by = partial(TorchFSDP, sharding_strategy=strategy, mixed_precision=precision, use_orig_params=orig)
    else:
        if half:
            policy["precision"] = PrecisionPolicy(compute=NARROW)
            policy["reduce"] = ReducePolicy(dtype=torch.float32)
        by = partial(FSDP, flatten=loop.door == "fsdp", **policy)
    for k in range(2):
        model.blocks[k] = by(model.blocks[k])
    if "spare unit" in traits:
        model.spare = by(model.spare)
    return by(model)


class Course:
    """One rank's way through a loop, and one process's."""

    def __init__(self, rank: int, ranks: int, loop: Loop, start: Any) -> None:
        self.rank, self.ranks, self.loop = rank, ranks, loop
        torch.manual_seed(0)
        self.plain = nn.ModuleList([Drawn(loop) for _ in range(loop.roots)])
        models: list[Any] = [copy.deepcopy(m) for m in self.plain]
        if loop.door == "sharded_ddp":
            optimizers = [self._optimizer([m], OSS) for m in models]
            models = [ShardedDDP(m, o) for m, o in zip(models, optimizers, strict=True)]  # type: ignore[arg-type]
        else:
            models = [sharded(loop, m) for m in models]
            alone = "own optimizers" in loop.traits
            optimizers = [self._optimizer([m]) for m in models] if alone else [self._optimizer(models)]
        self.models, self.optimizers = nn.ModuleList(models), optimizers
        self.truth = self._optimizer([*self.plain])
        if start is not None:
            values, state, of_plain = copy.deepcopy(start)
            for m in (self.plain, self.models):
                m[0].load_state_dict(values)
            self.truth.load_state_dict(of_plain)
            self.optimizers[0].load_state_dict(
                sharding_of(self.models[0]).get_shard_from_optim_state_dict(state)
            )
        average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.averages = [average(m) for m in (self.plain, self.models)] if "ema" in loop.traits else []

    def _optimizer(self, models: list[nn.Module], oss: Any = None) -> torch.optim.Optimizer:
        params = [p for m in models for p in m.parameters() if p.is_floating_point()]
        if self.loop.door in LISTS_ROWS:
            sides = [[p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]]
        else:
            sides = [[], params]
        groups = [{"params": ps, "weight_decay": d} for ps, d in zip(sides, (0.0, 0.3), strict=True) if ps]
        kind, options = torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3}
        if "momentum" in self.loop.traits:
            # sums over thousands of rows: with more the weights grow without an end, and with them what rounding does
            kind, options = (
                torch.optim.SGD,
                {"lr": 1e-4 if "large" in self.loop.traits else 0.02, "momentum": 0.9},
            )
        elif "signs" in self.loop.traits:
            kind, options = torch.optim.Rprop, {}
        return oss(groups, kind, **options) if oss else kind(groups, **options)  # type: ignore[no-any-return]

    def values(self, models: Any) -> dict[str, torch.Tensor]:
        """All roots' state, whole."""
        prefix = "module." if self.loop.door == "sharded_ddp" else ""
        return {
            f"{k}.{name.removeprefix(prefix)}": (v.full_tensor() if hasattr(v, "full_tensor") else v).clone()
            for k, model in enumerate(models)
            for name, v in model.state_dict().items()
        }

    def run(self, steps: range) -> Any:
        """Trains; returns what others start from."""
        for step in steps:
            self._freeze(step)
            self._backward(step)
            if self._clip():
                for optimizer in (*self.optimizers, self.truth):
                    optimizer.step()
                for average, m in zip(self.averages, (self.plain, self.models), strict=False):
                    average.update_parameters(m)
            if "half" in self.loop.traits:  # casts of what differs by a rounding differ by much more
                found = self.values(self.models)
                torch.testing.assert_close(found, dict(self.plain.state_dict()), rtol=1e-5, atol=1e-5)
                self.plain.load_state_dict(found)
        found = self.values(self.models)
        torch.testing.assert_close(found, dict(self.plain.state_dict()), rtol=1e-5, atol=1e-5)
        if self.averages:
            truth, mine = (a.module for a in self.averages)
            torch.testing.assert_close(self.values(mine), dict(truth.state_dict()), rtol=1e-5, atol=1e-5)
            tokens = torch.arange(3) % self.loop.sizes[2]
            with torch.no_grad():
                for a, b in zip(mine, truth, strict=True):
                    gap = 0.2 if "half" in self.loop.traits else 1e-5
                    torch.testing.assert_close(
                        a(tokens, True).to(b.scale), b(tokens, True), rtol=gap, atol=gap, equal_nan=True
                    )
        if self.loop.door not in RESUMES or self.loop.roots > 1:
            return None
        first = {name.removeprefix("0."): v for name, v in found.items()}
        state = sharding_of(self.models[0]).gather_full_optim_state_dict(self.optimizers[0])
        return first, state, copy.deepcopy(self.truth.state_dict())

    def _freeze(self, step: int) -> None:
        if not ({"freezes", "data"} & {*self.loop.traits}) or self.loop.door not in LISTS_ROWS[:3]:
            return
        for m in (*self.models, *self.plain):
            listed = next(p for n, p in m.named_parameters() if n.split(".")[-1] == "low")
            listed.requires_grad_("freezes" not in self.loop.traits or step != 1)
            if "data" in self.loop.traits and step == 1 and self.loop.door != "dtensors":
                listed.data = listed.data * 0.5

    def _backward(self, step: int) -> None:
        turn, last = self.loop.turns[step], self.ranks - 1
        for optimizer in (*self.optimizers, self.truth):
            optimizer.zero_grad(set_to_none=turn.to_none)
        for micro in range(turn.micros):
            for r in range(self.ranks):
                loss = self._loss(self.plain, r, step, micro, turn.turned)
                if loss is not None:
                    (loss / self.ranks).backward()
            turned = turn.turned != (step == self.loop.apart and self.rank == last)
            with contextlib.ExitStack() as waiting:
                if micro < turn.micros - 1:
                    for m in self.models:
                        api: Any = m if self.loop.door == "sharded_ddp" else sharding_of(m)
                        waiting.enter_context(api.no_sync())
                loss = self._loss(self.models, self.rank, step, micro, turned)
                assert loss is not None
                loss.backward()

    def _loss(self, models: Any, rank: int, step: int, micro: int, turned: bool) -> torch.Tensor | None:
        """Of all roots; None where gradients have been made already, of casts of one process's parameters."""
        turn, places = self.loop.turns[step], range(self.loop.roots)
        factor = float("nan") if {"all": True, "some": rank == 0}.get(turn.nan) else 1.0
        total: Any = 0.0
        for k in reversed(places) if turned else places:
            seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank + 1000 * k)
            tokens = torch.randint(0, self.loop.sizes[2], (3,), generator=seed)
            call, casts = models[k], {}
            if models is self.plain and "half" in self.loop.traits:
                named = {n: p for n, p in models[k].named_parameters() if p.is_floating_point()}
                casts = {n: p.detach().to(NARROW).requires_grad_(p.requires_grad) for n, p in named.items()}
                call = partial(torch.func.functional_call, models[k], casts)
            arguments = (tokens, {"all": True, "some": (rank + k) % 2 == 0}.get(turn.spares, False))
            out = call(arguments) if casts else call(*arguments)
            total = total + (factor * (k + 1)) * out.to(self.plain[0].scale).square().mean()
            if casts:
                total.backward()
                total = 0.0
                for n, p in named.items():
                    got = casts[n].grad
                    if got is not None:
                        p.grad = got.float() / self.ranks + (0 if p.grad is None else p.grad)
        return None if models is self.plain and "half" in self.loop.traits else total

    def _clip(self) -> bool:
        """Whether the step is taken: not if the norm is NaN."""
        if not {"clips", "torch clips"} & {*self.loop.traits}:
            return True
        if self.loop.door == "sharded_ddp":
            pairs = zip(self.optimizers, self.plain, strict=True)
            norms = [(o.clip_grad_norm(0.1), nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for o, m in pairs]
            for mine, other in norms:
                torch.testing.assert_close(mine.to(other), other, rtol=1e-5, atol=1e-6, equal_nan=True)
            return all(bool(mine.isfinite()) for mine, _ in norms)
        if self.loop.roots == 1 and "clips" in self.loop.traits:
            norm = sharding_of(self.models[0]).clip_grad_norm_(0.1)
        else:
            norm = nn.utils.clip_grad_norm_(self.models.parameters(), 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        truth = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
        torch.testing.assert_close(norm.to(truth), truth, rtol=1e-5, atol=1e-6, equal_nan=True)
        return bool(norm.isfinite())


def _goes(rank: int, ranks: int, loop: Loop, steps: range, start: Any) -> Any:
    course = Course(rank, ranks, loop, start)
    if loop.apart < 0:
        return course.run(steps)
    try:
        course.run(steps)
    except OutOfStepError as error:
        return str(error)
    return ""


@kept
def check_loop(loop: Loop) -> None:
    """Runs it on ranks, maybe on others after two steps."""
    backend, half = "gloo" if loop.door == "dtensors" else "simulated", 2 if loop.later else len(loop.turns)
    ends = rank_pool(loop.ranks, backend).run(_goes, loop.ranks, loop, range(half), None)
    if loop.apart >= 0:
        calls = [re.findall(r"(?:unit|Drawn) (\d+)", text) for text in ends]
        assert all(calls), ends
        assert len({number for found in calls for number in found}) > 1, ends
    elif loop.later:
        others = range(half, len(loop.turns))
        rank_pool(loop.later, backend).run(_goes, loop.later, loop, others, ends[0])


TRAITS = ("mixed", "frozen", "tied", "keeps", "clips", "torch clips", "freezes", "data", "half", "momentum", "ema",
          "own optimizers", "spare unit", "aligned", "large")  # fmt: skip


@st.composite
def loops(draw: st.DrawFn, doors: tuple[str, ...] = DOORS, most: int = 6) -> Loop:
    door, ranks, roots = (
        draw(st.sampled_from(doors)),
        draw(st.integers(1, most)),
        draw(st.sampled_from([1, 1, 2, 3])),
    )
    traits = draw(st.sets(st.sampled_from(TRAITS)))
    if "half" in traits:
        traits -= {"mixed", "large", *(("half",) if door == "sharded_ddp" else ())}
    if door not in LISTS_ROWS and "momentum" not in traits:
        traits |= {"spare unit"}  # a flat parameter has one count of steps
    spares = ["all", "none"] if "spare unit" in traits and door != "sharded_ddp" else ["all", "some", "none"]
    skips = {"clips", "torch clips"} & traits
    turns = st.builds(
        Turn, st.booleans(), st.sampled_from(spares), st.integers(1, 3),
        st.sampled_from(["nobody", "nobody", "all", "some"] if skips else ["nobody"]), st.booleans(),
    )  # fmt: skip
    later = draw(st.integers(0, 5)) if roots == 1 and door in RESUMES and "ema" not in traits else 0
    is_apart = roots > 1 and ranks > 1 and door != "dtensors" and draw(st.integers(0, 2)) == 0
    found = tuple(draw(st.lists(turns, min_size=4, max_size=4)))
    return Loop(
        door, ranks, draw(st.tuples(st.integers(2, 5), st.integers(1, 6), st.integers(2, 7))),
        tuple(sorted(traits)), found, roots, later, draw(st.integers(0, 3)) if is_apart else -1,
    )  # fmt: skip


SAME, SKIPPED = Turn(to_none=False), Turn(to_none=False, nan="all")
ONCE_WRONG = {
    f"{what}, {door}": Loop(door, 3, (4, 5, 3), ("clips", "tied", *traits), turns)
    for what, traits, turns in (
        ("decay by dimensions", (), (SAME,) * 4),
        ("steps that are skipped", (), (SAME, SKIPPED, SAME, SAME)),
        ("steps by signs", ("signs",), (SAME,) * 4),
    )
    for door in ("unflattened", "fully_shard", "dtensors")
} | {
    # what replaced memory brings anew is the same on ranks that have nothing of it
    "values that are set, of which the last rank has none": Loop(
        "unflattened", 3, (3, 3, 6), ("data",), (Turn(micros=2),) * 4
    )
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_loops_that_once_went_wrong(name: str) -> None:
    """With gradients that are filled with zeros, and rows that ranks can't divide."""
    check_loop(ONCE_WRONG[name])


@examples(30)
@given(loops())
def test_any_loop_through_any_door(loop: Loop) -> None:
    check_loop(loop)


@examples(6)
@given(loops(("dtensors",), 3))
def test_any_loop_over_dtensors(loop: Loop) -> None:
    check_loop(loop)
