"""Pipelines beside the real fairscale's, on the CPU: outputs, gradients, random numbers, balances, names.

What is compared is equal to the last bit: both run the same cells in the same order, there and back.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.nn import pipe as ours
from shardkit.nn.pipe import balance as our_balance
from shardkit.nn.pipe import skip as our_skip
from shardkit.nn.pipe.balance.blockpartition import solve
from shardkit.nn.pipe.skip.layout import inspect_skip_layout

pytest.importorskip("fairscale.nn.pipe")
from fairscale.nn import pipe as theirs
from fairscale.nn.pipe import skip as their_skip
from fairscale.nn.pipe.balance.blockpartition import solve as their_solve
from fairscale.nn.pipe.skip.layout import inspect_skip_layout as their_layout

pytestmark = pytest.mark.oracle
LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "linear": lambda skip: nn.Linear(4, 4),
    "tanh": lambda skip: nn.Tanh(),
    "norm": lambda skip: nn.LayerNorm(4),
    "dropout": lambda skip: nn.Dropout(0.3),
    "batch norm": lambda skip: nn.BatchNorm1d(4),
}


def skip_layers(skip: Any) -> tuple[type[nn.Module], type[nn.Module]]:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Iterator[Any]:
            yield skip.stash("skip", x.sin())
            return self.linear(x)

    class Pop(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[Any]:
            other = yield skip.pop("skip")
            return x + other

    return skip.skippable(stash=["skip"])(Stash), skip.skippable(pop=["skip"])(Pop)


def build(skip: Any, kinds: list[str], skips: list[tuple[int, int]]) -> nn.Sequential:
    """Layers of these kinds, with skip connections from place to place."""
    stash, pop = skip_layers(skip)
    layers: list[list[nn.Module]] = [[LAYERS[kind](skip)] for kind in kinds]
    for start, end in skips:
        ns = skip.Namespace()
        layers[start].insert(0, stash().isolate(ns))
        layers[end].append(pop().isolate(ns))
    return nn.Sequential(*(layer for group in layers for layer in group))


@st.composite
def programs(draw: Any) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))
    place = st.integers(0, len(kinds) - 1)
    skips = [tuple(sorted(pair)) for pair in draw(st.lists(st.tuples(place, place), max_size=2))]
    number = len(kinds) + 2 * len(skips)
    cuts = sorted(draw(st.sets(st.integers(1, number - 1), max_size=3))) if number > 1 else []
    return {
        "kinds": kinds,
        "skips": skips,
        "balance": [b - a for a, b in zip([0, *cuts], [*cuts, number], strict=True)],
        "chunks": draw(st.integers(1, 4)),
        # Each micro-batch needs two rows for a batch norm.
        "rows": draw(st.sampled_from([8, 12, 15])),
        "checkpoint": draw(st.sampled_from(["always", "except_last", "never"])),
        "training": draw(st.booleans()),
        "input gradient": draw(st.booleans()),
    }


def run(pipe: Any, skip: Any, program: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    module = build(skip, program["kinds"], program["skips"])
    balance = program["balance"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pipe.Pipe(
            module,
            balance,
            devices=["cpu"] * len(balance),
            chunks=program["chunks"],
            checkpoint=program["checkpoint"],
            deferred_batch_norm=program["rows"] == 12,
        )
    model.train(program["training"])
    x = torch.randn(program["rows"], 4, requires_grad=program["input gradient"])
    output = model(x)
    if output.requires_grad:
        (output * torch.randn_like(output)).sum().backward()
    # fairscale counts checkpointed micro-batches twice
    statistics = ("running_mean", "running_var", "tracked")
    state = {k: v for k, v in model.state_dict().items() if not k.endswith(statistics)}
    return {
        "output": output.detach(),
        "input gradient": x.grad,
        "gradients": [p.grad for p in model.parameters()],
        "state": state,
        "names": list(model.state_dict()),
        "random": torch.rand(1),
        "facts": (len(model), model.balance, model.devices, model.chunks, model.checkpoint),
        "repr": [type(layer).__name__ for layer in model],
    }


def same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            same(found[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            same(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where


RANDOM = {
    "kinds": ["dropout"] * 3, "skips": [], "balance": [1, 1, 1], "chunks": 3, "rows": 12, "checkpoint": "except_last",
    "training": True, "input gradient": True,
}  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@example(RANDOM)
@given(programs())
def test_programs(program: dict[str, Any]) -> None:
    """Drawn modules, balances, micro-batches and modes; dropout draws the same numbers."""
    found, expected = run(ours, our_skip, program), run(theirs, their_skip, program)
    # fairscale gives zeros where no gradient comes.
    for side in (found, expected):
        side["gradients"] = [torch.zeros(1) if g is None or not g.any() else g for g in side["gradients"]]
    same(found, expected)


# ------------------------------------------------------------------------------------------ balances
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 100) | st.integers(0, 3), min_size=1, max_size=14), st.data())
def test_blocks(costs: list[int], data: Any) -> None:
    """The same blocks, wherever fairscale finds some (it may run forever, or leave blocks empty)."""
    partitions = data.draw(st.integers(1, len(costs)))
    found = solve(costs, partitions)
    assert [x for block in found for x in block] == costs
    assert len(found) == partitions
    assert all(found)
    expected = limited(their_solve, costs, partitions)
    if expected is not None and all(expected):
        assert found == expected


class _TooLong(Exception):
    pass


def limited(function: Callable[..., Any], *args: Any) -> Any:
    """None if it takes longer than 0.1 s."""

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
    try:
        return function(*args)
    except _TooLong:
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_fairscale_blocks_that_never_come() -> None:
    costs = [0, 0, 0, 0, 0, 1, 43, 0, 1, 0, 97, 0, 1, 1]
    assert limited(their_solve, costs, 10) is None
    assert [sum(block) for block in solve(costs, 10)]


@pytest.mark.parametrize("arguments", [([1, 2, 3, 4, 5, 6], 2), ([1, 2], 3), ([1], 0)])
def test_blocks_refused(arguments: tuple[list[int], int]) -> None:
    try:
        expected = their_solve(*arguments)
    except ValueError:
        with pytest.raises(ValueError):
            solve(*arguments)
    else:
        assert solve(*arguments) == expected


def test_balance_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that layers alone move: a busy machine would measure anything."""
    now = [0.0]

    class Busy(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += self.seconds
            return x * x

    module, sample = nn.Sequential(*(Busy(n / 1000) for n in (1, 1, 1, 1, 60, 60))), torch.randn(4, 4)
    with monkeypatch.context() as patch:
        for clock in ("time", "perf_counter", "monotonic"):
            patch.setattr(time, clock, lambda: now[0])
        found = our_balance.balance_by_time(2, module, sample, timeout=0.2, device="cpu")
        assert found == theirs.balance.balance_by_time(2, module, sample, timeout=0.2, device="cpu") == [5, 1]
    module(sample.requires_grad_()).sum().backward()
    linear = nn.Sequential(nn.Linear(2, 2))
    linear(torch.randn(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="already has gradient"):
        our_balance.balance_by_time(1, linear, torch.randn(1, 2), device="cpu")


def test_balance_by_size() -> None:
    """Counted, so that it works without CUDA: a linear layer keeps its output, and its input if others made it."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 100), nn.Flatten())
    sizes = our_balance.profile_sizes(module, torch.randn(6, 4), 2, 3.0, torch.device("cpu"))
    assert sizes == [8 * 4 * 3 + 40 * 4 * 3, 8 * 4 * 3, 100 * 4 * 3 + 900 * 4 * 3, 0]
    assert our_balance.balance_by_size(2, module, torch.randn(6, 4), chunks=2, device="cpu") == [2, 2]


# ------------------------------------------------------------------------------------------ routes of skip tensors
def _layers(
    library: Any, routes: list[tuple[int, int]], isolated: bool, partitions: int
) -> list[nn.Sequential]:
    """A layer that stashes and one that pops for each route, under names of their own or in namespaces."""
    module: list[list[nn.Module]] = [[] for _ in range(partitions)]
    for k, (here, there) in enumerate(routes):
        name = "same" if isolated else f"name{k}"

        class Stashing(nn.Module):
            def forward(self, x):  # type: ignore[no-untyped-def]
                yield library.stash(name, x)  # noqa: B023
                return x

        class Popping(nn.Module):
            def forward(self, x):  # type: ignore[no-untyped-def]
                return x + (yield library.pop(name))  # noqa: B023

        both = [library.skippable(stash=[name])(Stashing)(), library.skippable(pop=[name])(Popping)()]
        if isolated:
            space = library.Namespace()
            both = [layer.isolate(space) for layer in both]
        module[here].append(both[0])
        module[max(here, there)].append(both[1])
    return [nn.Sequential(*layers) for layers in module]


@given(
    st.booleans(), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5)
)
def test_routes(isolated: bool, partitions: int, routes: list[tuple[int, int]]) -> None:
    routes = [(here % partitions, there % partitions) for here, there in routes]
    ours = inspect_skip_layout(_layers(our_skip, routes, isolated, partitions))
    right = their_layout(_layers(their_skip, routes, isolated, partitions))
    for k in range(partitions):
        for of in ("copy_policy", "copy_policy_by_src"):
            found, expected = (
                [(j, ns is not None, name) for j, ns, name in getattr(layout, of)(k)]
                for layout in (ours, right)
            )
            assert found == expected, of
    assert [ours.requires_copy(*key) for key in ours.by_ns_name] == [
        right.requires_copy(*key) for key in right.by_ns_name
    ]
    assert not ours.requires_copy(None, "of nobody")
