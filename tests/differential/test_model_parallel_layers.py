"""Model parallelism beside the real fairscale, in the same ranks: same groups, start values, outputs, gradients.

What is compared is equal to the last bit: both draw, multiply and sum the same numbers in the same order.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardkit import model_parallel as ours_core
from shardkit.nn import model_parallel as ours
from shardkit.nn.model_parallel import cross_entropy, initialize, layers, mappings, random, utils
from tests.pools import on_ranks, rank_pool

pytest.importorskip("fairscale.nn.model_parallel")
pytestmark = pytest.mark.oracle
NAMES = ["", "cross_entropy", "initialize", "layers", "mappings", "random", "utils"]
sizes = pytest.mark.parametrize("size", [1, 2, 4])


def theirs(name: str = "") -> Any:
    return importlib.import_module("fairscale.nn.model_parallel" + (f".{name}" if name else ""))


def mine(name: str = "") -> Any:
    return importlib.import_module("shardkit.nn.model_parallel" + (f".{name}" if name else ""))


# ------------------------------------------------------------------------------------------ names and signatures
def _public(module: Any) -> dict[str, Any]:
    """Functions and classes of fairscale.nn.model_parallel that a module shows."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("fairscale.nn.model_parallel")
    }  # fmt: skip


def _arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# what fairscale's head has, after 0.4.13
LATER = {"initialize_model_parallel": {"context_parallel_size", "cp_backend", "timeout"}}
REDIRECTED = {"CheckpointFunction"}  # docs/PARITY.md says where to


@pytest.mark.parametrize("name", NAMES)
def test_names_and_signatures(name: str) -> None:
    for key, value in _public(theirs(name)).items():
        own = getattr(mine(name), key)
        if key in REDIRECTED:
            continue
        later = LATER.get(key, set())
        assert [a for a in _arguments(own) if a[0] not in later] == _arguments(value), key
        if inspect.isclass(value):
            assert {b.__name__ for b in value.__mro__} <= {b.__name__ for b in own.__mro__}
            for method, function in vars(value).items():
                if not method.startswith("_") and callable(getattr(value, method)):
                    assert _arguments(getattr(own, method)) == _arguments(getattr(value, method)), method
                    assert isinstance(vars(own)[method], type(function)), method


def test_a_name_is_the_same_thing_everywhere() -> None:
    for name in ours_core.__all__:
        found = {
            getattr(m, name)
            for m in (ours, initialize, layers, mappings, cross_entropy, random, utils)
            if hasattr(m, name)
        }
        assert found == {getattr(ours_core, name)}, name


# ------------------------------------------------------------------------------------------ in ranks
def _both(size: int, pipeline: int = 1) -> None:
    theirs("initialize").initialize_model_parallel(size, pipeline)
    ours.initialize_model_parallel(size, pipeline)


def _end() -> None:
    theirs("initialize").destroy_model_parallel()
    ours.destroy_model_parallel()


def _equal(first: Any, second: Any, where: object = "") -> None:
    assert first.dtype == second.dtype
    assert first.shape == second.shape, where
    assert torch.equal(first, second), (where, (first - second).abs().max())


@on_ranks(4)
def test_groups(rank: int) -> None:
    import torch.distributed as dist

    readers = [n for n in _public(theirs("initialize")) if n.startswith(("get_", "model_parallel_is"))]
    assert len(readers) == 10
    for size, pipeline in ((1, 1), (2, 1), (4, 1), (9, 1), (1, 2), (2, 2), (1, 4)):
        assert not initialize.model_parallel_is_initialized()
        assert initialize._MODEL_PARALLEL_GROUP is None
        _both(size, pipeline)
        for name in readers:
            first, second = getattr(initialize, name)(), getattr(theirs("initialize"), name)()
            if name.endswith("_group"):
                first, second = dist.get_process_group_ranks(first), dist.get_process_group_ranks(second)
            assert first == second, (name, size, pipeline)
        assert initialize._MODEL_PARALLEL_GROUP is initialize.get_model_parallel_group()
        with pytest.raises(AssertionError):
            theirs("initialize").initialize_model_parallel(size, pipeline)
        with pytest.raises(AssertionError):
            initialize.initialize_model_parallel(size, pipeline)
        _end()


Make = Callable[[Any], Any]
LAYERS: dict[str, tuple[Make, tuple[int, ...], bool]] = {
    "column": (lambda m: m.ColumnParallelLinear(8, 12), (2, 3, 8), False),
    "column, parts": (lambda m: m.ColumnParallelLinear(8, 12, False, False), (5, 8), False),
    "column, stride": (
        lambda m: m.ColumnParallelLinear(8, 24, stride=3, init_method=torch.nn.init.normal_,
                                         keep_master_weight_for_test=True), (5, 8), False,
    ),
    "row": (lambda m: m.RowParallelLinear(12, 8), (2, 3, 12), False),
    "row, parts": (lambda m: m.RowParallelLinear(12, 8, False, True), (5, -12), False),
    "row, stride": (
        lambda m: m.RowParallelLinear(24, 8, stride=3, keep_master_weight_for_test=True), (5, 24), False,
    ),
    "embedding": (lambda m: m.ParallelEmbedding(12, 8), (2, 3), True),
    "embedding, options": (
        lambda m: m.ParallelEmbedding(12, 8, padding_idx=2, scale_grad_by_freq=True), (2, 3), True,
    ),
    "vocabulary": (lambda m: m.VocabParallelEmbedding(12, 8), (2, 3), True),
}  # fmt: skip


@sizes
@on_ranks(4)
def test_layers(rank: int, size: int) -> None:
    _both(size)
    try:
        for name, (make, shape, tokens) in LAYERS.items():
            results = []
            for module in (layers, theirs("layers")):
                torch.manual_seed(5)
                layer = make(module)
                drawn = torch.rand(1)  # the generator is at the same place
                torch.manual_seed(6 + (rank % size if shape[-1] < 0 else 0))
                shape_here = (*shape[:-1], -shape[-1] // size) if shape[-1] < 0 else shape
                x = torch.randint(12, shape_here) if tokens else torch.randn(shape_here, requires_grad=True)
                y = layer(x)
                torch.manual_seed(8)
                y.backward(torch.randn(y.shape))
                values = {"drawn": drawn, "y": y.detach(), **layer.state_dict()}
                values |= {f"gradient of {n}": p.grad for n, p in layer.named_parameters()}
                if not tokens:
                    values["gradient of x"] = x.grad
                    values["whole"] = layer.get_master_weight()
                if getattr(layer, "master_weight", None) is not None:
                    values["master_weight"] = layer.master_weight.detach()
                attributes = {k: v for k, v in vars(layer).items()
                              if isinstance(v, (int, float, str, type(None))) and not k.startswith("_")}  # fmt: skip
                results.append((values, attributes))
            (own, own_attributes), (real, real_attributes) = results
            assert own.keys() == real.keys()
            for key, value in own.items():
                _equal(value, real[key], (name, key))
            # fairscale's norm_type of this layer is another argument's value
            skip = ("norm_type",) if "embedding" in name else ()
            for key, value in real_attributes.items():
                assert key in skip or own_attributes[key] == value, (name, key)
    finally:
        _end()


@sizes
@on_ranks(4)
def test_regions_and_loss(rank: int, size: int) -> None:
    _both(size)
    try:
        part = rank % size
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for name in ("copy_to", "reduce_from", "scatter_to", "gather_from"):
                results = []
                for module in (mappings, theirs("mappings")):
                    torch.manual_seed(part)
                    leaf = torch.randn(3, 8).to(dtype).requires_grad_()
                    # not the leaf itself: fairscale sums where it stands
                    y = getattr(module, f"{name}_model_parallel_region")(leaf * 1)
                    y.backward(torch.randn(y.shape).to(dtype))
                    results.append((y.detach(), leaf.grad))
                for first, second in zip(*results, strict=True):
                    _equal(first, second, (name, dtype))
            results = []
            for module in (cross_entropy, theirs("cross_entropy")):
                torch.manual_seed(part)
                leaf = (torch.randn(2, 5, 12 // size) * 5).to(dtype).requires_grad_()
                torch.manual_seed(9)
                loss = module.vocab_parallel_cross_entropy(leaf * 1, torch.randint(12, (2, 5)))
                loss.backward(torch.randn(2, 5).to(dtype))
                results.append((loss.detach(), leaf.grad))
            for first, second in zip(*results, strict=True):
                _equal(first, second, ("cross entropy", dtype))
    finally:
        _end()


# fairscale's checkpoint asks CUDA for its random state: it runs where CUDA is pretended, in ranks of its own.
def _checkpoint(rank: int, package: str) -> list[torch.Tensor]:
    module = importlib.import_module(f"{package}.nn.model_parallel")
    saved = importlib.import_module(f"{package}.nn.model_parallel.random").checkpoint
    module.initialize_model_parallel(2)
    try:
        torch.manual_seed(3)
        up = module.ColumnParallelLinear(8, 12, gather_output=False)
        down = module.RowParallelLinear(12, 8, input_is_parallel=True)
        x = torch.randn(4, 8, requires_grad=True)
        y, z = saved(lambda a, b: (F.dropout(down(F.dropout(up(a), 0.3)) * b, 0.3), a * 2), x, x.detach() + 1)
        (y.pow(2).sum() + z.sum()).backward()
        return [
            y.detach(),
            z.detach(),
            x.grad,
            torch.rand(1),
            *(p.grad for p in [*up.parameters(), *down.parameters()]),
        ]
    finally:
        module.destroy_model_parallel()


def test_checkpoint() -> None:
    own = rank_pool(2).run(_checkpoint, "shardkit")
    real = rank_pool(2, "fairscale").run(_checkpoint, "fairscale")
    for rank in range(2):
        for i, (first, second) in enumerate(zip(own[rank], real[rank], strict=True)):
            _equal(first, second, i)
