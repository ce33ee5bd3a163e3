"""Model parallelism beside the real fairscale, in the same ranks: groups, and stacks of layers, drawn.

Stacks are the same as fairscale's to the last bit, and as the unsharded stack.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardkit import model_parallel as core
from shardkit.nn import model_parallel as ours
from shardkit.nn.model_parallel import cross_entropy, initialize, layers, mappings, random, utils
from shardkit.tools.verify import EXACT, check_named, tolerance_of
from tests.differential.keeping import kept
from tests.pools import on_ranks, rank_pool
from tests.programs.running import examples

pytest.importorskip("fairscale.nn.model_parallel")
pytestmark = pytest.mark.oracle
RANKS = 4
LIBRARIES = ("shardkit", "fairscale")


# ------------------------------------------------------------------------------------------ names and groups
def theirs(name: str = "") -> Any:
    return importlib.import_module("fairscale.nn.model_parallel" + (f".{name}" if name else ""))


def _public(module: Any) -> dict[str, Any]:
    """Functions and classes of fairscale.nn.model_parallel that a module shows."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("fairscale.nn.model_parallel")
    }  # fmt: skip


def test_a_name_is_the_same_thing_everywhere() -> None:
    for name in core.__all__:
        found = {
            getattr(m, name)
            for m in (ours, initialize, layers, mappings, cross_entropy, random, utils)
            if hasattr(m, name)
        }
        assert found == {getattr(core, name)}, name


@on_ranks(4)
def test_groups(rank: int) -> None:
    import torch.distributed as dist

    readers = [n for n in _public(theirs("initialize")) if n.startswith(("get_", "model_parallel_is"))]
    assert len(readers) == 10
    for size, pipeline in ((1, 1), (2, 1), (4, 1), (9, 1), (1, 2), (2, 2), (1, 4)):
        assert not initialize.model_parallel_is_initialized()
        assert initialize._MODEL_PARALLEL_GROUP is None
        for state in (theirs("initialize"), initialize):
            state.initialize_model_parallel(size, pipeline)
        for name in readers:
            first, second = getattr(initialize, name)(), getattr(theirs("initialize"), name)()
            if name.endswith("_group"):
                first, second = dist.get_process_group_ranks(first), dist.get_process_group_ranks(second)
            assert first == second, (name, size, pipeline)
        assert initialize._MODEL_PARALLEL_GROUP is initialize.get_model_parallel_group()
        for state in (theirs("initialize"), initialize):
            with pytest.raises(AssertionError):
                state.initialize_model_parallel(size, pipeline)
            state.destroy_model_parallel()


# ------------------------------------------------------------------------------------------ stacks
@dataclass(frozen=True)
class Layer:
    """A linear layer, split by "columns" or "rows", or a "pair" of both with only a part of the features between.

    Attributes:
        units: output features (of a pair: those between), times 4, so that 1, 2 and 4 ranks divide them.
        stride: how many matrices lie in one (as query, key and value do).
        init: name of the function in ``torch.nn.init`` that draws the weight.
    """

    kind: str
    units: int
    bias: bool = True
    stride: int = 1
    init: str = "xavier_normal_"


@dataclass(frozen=True)
class Stack:
    """What is trained: an embedding, layers, and a loss over a vocabulary that is split."""

    embedding: str
    vocabulary: int
    width: int
    layers: tuple[Layer, ...]
    dtype: torch.dtype = torch.float32
    rows: int = 3
    seed: int = 0


def build(stack: Stack, package: str) -> list[nn.Module]:
    """The layers with a library's classes, or with torch's ("torch")."""
    library = importlib.import_module(f"{package}.nn.model_parallel.layers") if package != "torch" else None
    modules: list[nn.Module] = []
    if library is None:
        modules.append(nn.Embedding(4 * stack.vocabulary, 4 * stack.width))
    else:
        modules.append(getattr(library, stack.embedding)(4 * stack.vocabulary, 4 * stack.width))
    width = 4 * stack.width
    for layer in (*stack.layers, Layer("head", stack.vocabulary)):
        modules += _linear(library, layer, width)
        width = width if layer.kind == "pair" else 4 * layer.units
    return [m.to(stack.dtype) for m in modules]


def _linear(library: Any, layer: Layer, width: int) -> list[nn.Module]:
    units = 4 * layer.units
    if library is None:
        if layer.kind == "pair":
            return [nn.Linear(width, units, layer.bias), nn.Linear(units, width, layer.bias)]
        return [nn.Linear(width, units, layer.bias)]
    init = {"init_method": getattr(nn.init, layer.init)}
    column, row = library.ColumnParallelLinear, library.RowParallelLinear
    if layer.kind == "columns":
        return [column(width, units, layer.bias, stride=layer.stride, **init)]
    if layer.kind == "rows":
        return [row(width, units, layer.bias, stride=layer.stride, **init)]
    if layer.kind == "head":
        return [column(width, units, gather_output=False)]
    return [
        column(width, units, layer.bias, gather_output=False, stride=layer.stride, **init),
        row(units, width, layer.bias, input_is_parallel=True, **init),
    ]


def train(stack: Stack, modules: list[nn.Module], package: str) -> dict[str, torch.Tensor]:
    """Two steps; losses, gradients and parameters by name."""
    params = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    generator = torch.Generator().manual_seed(stack.seed)
    seen: dict[str, torch.Tensor] = {}
    for step in range(2):
        tokens = torch.randint(4 * stack.vocabulary, (stack.rows, 2), generator=generator)
        targets = torch.randint(4 * stack.vocabulary, (stack.rows, 2), generator=generator)
        x = modules[0](tokens)
        for module in modules[1:-1]:
            x = torch.tanh(module(x))
        logits = modules[-1](x)
        if package == "torch":
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            module = importlib.import_module(f"{package}.nn.model_parallel.cross_entropy")
            # not what the head returned: fairscale computes in its memory
            loss = module.vocab_parallel_cross_entropy(logits * 1, targets).mean()
        optimizer.zero_grad()
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for i, p in enumerate(params):
            seen[f"gradient {i} {step}"] = p.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
    return {**seen, **{f"parameter {i}": p.detach().clone() for i, p in enumerate(params)}}


def whole(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Start values of all parameters as an unsharded model has them; every rank takes part."""
    gather = importlib.import_module("shardkit.nn.model_parallel.mappings").gather_from_model_parallel_region
    parameters = []
    for module in modules:
        kind = type(module).__name__
        weight = module.weight.detach()
        if kind in ("VocabParallelEmbedding", "ColumnParallelLinear"):
            parameters.append(gather(weight.t().contiguous()).t())
        else:
            parameters.append(gather(weight))
        bias = getattr(module, "bias", None)
        if bias is not None:
            parameters.append(gather(bias.detach()) if kind == "ColumnParallelLinear" else bias.detach())
    return [p.clone() for p in parameters]


def _split(size: int) -> None:
    """Both libraries' groups; kept from example to example, since fairscale's outlive their destruction."""
    ours, theirs = (importlib.import_module(f"{name}.nn.model_parallel.initialize") for name in LIBRARIES)
    if ours.model_parallel_is_initialized() and ours.get_model_parallel_world_size() == size:
        return
    for state in (ours, theirs):
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()
        state.initialize_model_parallel(size)


def unsplit(rank: int) -> None:
    """Leaves the ranks as they were."""
    for name in LIBRARIES:
        importlib.import_module(f"{name}.nn.model_parallel.initialize").destroy_model_parallel()


def _both(rank: int, stack: Stack, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    _split(size)
    runs, start = [], []
    for name in LIBRARIES:
        torch.manual_seed(stack.seed)
        modules = build(stack, name)
        start = whole(modules) if name == "shardkit" else start
        runs.append(train(stack, modules, name))
    check_named(f"rank {rank}, shardkit beside fairscale,", runs[0], runs[1], EXACT)
    plain = build(stack, "torch")
    with torch.no_grad():
        for p, value in zip((p for m in plain for p in m.parameters()), start, strict=True):
            p.copy_(value)
    return runs[0], train(stack, plain, "torch")


@kept
def check_stack(stack: Stack, size: int) -> None:
    """fairscale to the last bit; the unsharded stack's losses up to rounding."""
    for rank, (got, want) in enumerate(rank_pool(RANKS).run(_both, stack, size)):
        for step in range(2):
            name = f"loss {step}"
            check_named(
                f"rank {rank}, beside torch,",
                {name: got[name]},
                {name: want[name]},
                tolerance_of(stack.dtype),
            )


@pytest.fixture(scope="module", autouse=True)
def _others_find_no_groups() -> Iterator[None]:
    yield
    rank_pool(RANKS).run(unsplit)


def _possible(layer: Layer) -> Layer:
    """A stride has to divide what a rank has of the split dimension."""
    if layer.kind == "rows" or layer.units % 2:
        return dataclasses.replace(layer, stride=1)
    return layer


drawn_layers = st.builds(
    Layer,
    st.sampled_from(["columns", "rows", "pair"]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from(["xavier_normal_", "normal_", "kaiming_uniform_"]),
).map(_possible)


@pytest.mark.parametrize("size", [1, 2, 4])
@examples(40)
@given(
    stack=st.builds(
        Stack,
        st.sampled_from(["ParallelEmbedding", "VocabParallelEmbedding"]),
        st.integers(1, 5),
        st.integers(1, 3),
        st.lists(drawn_layers, max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.integers(1, 4),
        st.integers(0, 999),
    )
)
def test_any_stack(size: int, stack: Stack) -> None:
    check_stack(stack, size)
