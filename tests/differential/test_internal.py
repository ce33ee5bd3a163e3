"""fairscale's inner helpers beside ours, on drawn input: the same values, containers, types, dtypes and views."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from shardkit.internal import containers, parallel, params, state_dict, version
from shardkit.internal import object as objects
from shardkit.internal.reduce_scatter_bucketer import ReduceScatterBucketer
from shardkit.nn.misc.param_bucket import GradBucket, ParamBucket
from shardkit.optim.layerwise_gradient_scaler import LayerwiseGradientScaler
from tests.pools import rank_pool

pytest.importorskip("fairscale")
import fairscale.internal.containers as their_containers
import fairscale.internal.object as their_objects
import fairscale.internal.parallel as their_parallel
import fairscale.internal.params as their_params
import fairscale.internal.reduce_scatter_bucketer as their_bucketer
import fairscale.internal.state_dict as their_state_dict
import fairscale.internal.version as their_version
import fairscale.nn.misc.param_bucket as their_buckets
import fairscale.optim.layerwise_gradient_scaler as their_layerwise

pytestmark = pytest.mark.oracle

Pair = namedtuple("Pair", "left right")
leaves = st.one_of(
    st.integers(-5, 5),
    st.none(),
    st.text(max_size=2),
    st.lists(st.integers(0, 9), max_size=4).map(torch.tensor),
)


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(st.integers(0, 5), max_size=3),
        st.builds(Pair, inner, inner),
        keyed,
        keyed.map(OrderedDict),
        keyed.map(lambda d: defaultdict(list, d)),
    )


nests = st.recursive(leaves, _nest, max_leaves=8)


def plain(x: Any) -> Any:
    """With types, comparable by ``==``."""
    if isinstance(x, torch.Tensor):
        return ("tensor", x.dtype, x.tolist())
    if isinstance(x, np.ndarray):
        return ("array", str(x.dtype), x.tolist())
    if isinstance(x, dict):
        return (type(x), [(k, plain(v)) for k, v in x.items()])
    if isinstance(x, (list, tuple)):
        return (type(x), [plain(v) for v in x])
    return (type(x), x)


@settings(max_examples=60, deadline=None)
@given(nests)
def test_containers(nest: Any) -> None:
    for name in ("apply_to_tensors", "to_np", "from_np"):
        function, theirs = getattr(containers, name), getattr(their_containers, name)
        args = (lambda t: t + 1,) if name == "apply_to_tensors" else ()
        assert plain(function(*args, nest)) == plain(theirs(*args, nest)), name
    doubled = [m.apply_to_type(lambda x: isinstance(x, int), lambda x: 2 * x, nest) for m in
               (containers, their_containers)]  # fmt: skip
    assert plain(doubled[0]) == plain(doubled[1])
    copies = [m.recursive_copy_to_device(nest, True, torch.device("cpu")) for m in (params, their_params)]
    assert plain(copies[0]) == plain(copies[1])


@settings(max_examples=40, deadline=None)
@given(st.lists(leaves, max_size=5).map(tuple), st.dictionaries(st.sampled_from("abcd"), leaves))
def test_argument_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packed, theirs = containers.pack_kwargs(*args, **kwargs), their_containers.pack_kwargs(*args, **kwargs)
    assert plain(packed) == plain(theirs)
    assert plain(containers.unpack_kwargs(*theirs)) == plain(their_containers.unpack_kwargs(*packed))
    split, other = containers.split_non_tensors(args), their_containers.split_non_tensors(args)
    assert plain(split) == plain(other)
    assert plain(containers.unpack_non_tensors(*other)) == plain(args)
    one = torch.ones(2)
    assert containers.split_non_tensors(one)[1] is None
    assert containers.unpack_non_tensors((one,), None) == (one,)


def test_packed_sequence() -> None:
    """fairscale returns it as it was."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert their_containers.apply_to_tensors(torch.Tensor.half, packed).data.dtype is torch.float32
    ours = containers.apply_to_tensors(torch.Tensor.half, packed)
    assert (type(ours), ours.data.dtype) == (type(packed), torch.float16)
    assert torch.equal(ours.batch_sizes, packed.batch_sizes)


@settings(max_examples=30, deadline=None)
@given(nests, st.sampled_from([0, 4096]))
def test_objects_read_each_other(obj: Any, size: int) -> None:
    ours, theirs = (m.pyobject_to_tensor(obj, size) for m in (objects, their_objects))
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert (
        plain(objects.tensor_to_pyobject(theirs))
        == plain(their_objects.tensor_to_pyobject(ours))
        == plain(obj)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=4),
    st.sampled_from([0.5, 1, 2, 2.0, 3, math.inf]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_norms(sizes: list[tuple[int, bool]], p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    some = [nn.Parameter(torch.randn(n, dtype=dtype)) for n, _ in sizes]
    for x, (_, has) in zip(some, sizes, strict=True):
        x.grad = torch.randn_like(x) if has else None
    torch.testing.assert_close(params.calc_grad_norm(some, p), their_params.calc_grad_norm(some, p))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6))
def test_chunks(numel: int, chunks: int) -> None:
    tensor = torch.arange(float(numel)).view(1, numel)
    assert plain(parallel.chunk_and_pad(tensor, chunks)) == plain(
        their_parallel.chunk_and_pad(tensor, chunks)
    )


@pytest.mark.parametrize(
    "text", ["2.9.0+cpu", "1.13.1", "2.13.0a0+git", "2.1.0.dev20230101", "2.1", "nightly"]
)
def test_versions(text: str) -> None:
    assert version.torch_version(text) == their_version.torch_version(text)


def test_state_dict_helpers() -> None:
    net = nn.Sequential(
        nn.Linear(1, 1), nn.ModuleDict({"ln": nn.LayerNorm(1)}), nn.Sequential(nn.LayerNorm(1))
    )
    for kind in (nn.LayerNorm, nn.Sequential, nn.Dropout):
        ours, theirs = (m.find_module_instances(net, kind) for m in (state_dict, their_state_dict))
        assert ours == theirs
    for old, new in (("a.", "b."), ("", "x."), ("a.b", "")):
        results = []
        for m in (state_dict, their_state_dict):
            d = OrderedDict({"a.w": 1, "a.b.w": 2, "ba.": 3})
            m.replace_by_prefix_(d, old, new)
            results.append(dict(d))
        assert results[0] == results[1]


# ------------------------------------------------------------------ buckets
def _bucket_program(param_class: Any, grad_class: Any, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    some = [nn.Parameter(torch.randn(n, 2)) for n in (1, 3, 2)]
    seen: list[Any] = []

    def note(bucket: Any) -> None:
        seen.append((bucket.buffer.dtype, bucket.buffer.tolist(), bucket._fill))
        for p in some:
            seen.append((p.tolist(), None if p.grad is None else p.grad.tolist()))

    values = param_class(12, torch.float32, torch.device("cpu"))
    for p in some:
        values.add_param(p)
    values.buffer.mul_(2)
    note(values)
    values.to("cpu", torch.float64)
    values.buffer.add_(1)
    note(values)
    for p in some:
        p.grad = None
    values.to("cpu", torch.float32)
    grads = grad_class(20, torch.float32, torch.device("cpu"), 1)
    some[0].sum().backward()
    for p in some:
        seen.append((grads.can_add_grad_view(p), grads.all_checked_in))
        grads.add_grad(p)
        grads.params_checked_in += 1
    seen += [grads.can_add_grad_view(some[0]), grads.all_checked_in, grads.sent, grads.destination]
    (some[1].sum() * 3).backward()
    note(grads)
    grads.shrink()
    grads.buffer.add_(1)
    note(grads)
    grads.zero()
    note(grads)
    grads.collapse()
    note(grads)
    some[2].sum().backward()
    grads.rebuild()
    note(grads)
    grads.reset_checked_in()
    seen += [grads.all_checked_in, grads.sent]
    return seen


@pytest.mark.parametrize("seed", [0, 1])
def test_buckets(seed: int) -> None:
    ours = _bucket_program(ParamBucket, GradBucket, seed)
    assert ours == _bucket_program(their_buckets.ParamBucket, their_buckets.GradBucket, seed)


def _inputs(rank: int, world_size: int, shapes: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    made = torch.Generator().manual_seed(rank)
    return [[torch.randn(s, generator=made) for _ in range(world_size)] for s in shapes]


def _bucketed(
    cls: Any, rank: int, world_size: int, cap: float, shapes: list[tuple[int, ...]], group: Any
) -> list[Any]:
    results: list[Any] = []
    bucketer = cls(cap)
    for i, tensors in enumerate(_inputs(rank, world_size, shapes)):
        bucketer.reduce_scatter_async(tensors, group, lambda r, i=i: results.append((i, r)))
        results.append(("called", i))
    bucketer.flush()
    bucketer.teardown()
    kept = [(i, r.clone()) if isinstance(r, torch.Tensor) else (i, r) for i, r in results]
    bucketer.reduce_scatter_async([torch.ones(2)] * world_size, group, lambda r: kept.append((-1, r.clone())))
    bucketer.flush()
    return kept


def _bucketer_ranks(rank: int, world_size: int, cap: float, shapes: list[tuple[int, ...]]) -> None:
    group = dist.group.WORLD
    ours = _bucketed(ReduceScatterBucketer, rank, world_size, cap, shapes, group)
    their_bucketer.enable_nccl_base_collectives = False  # gloo refuses the shapes that it gives the other one
    theirs = _bucketed(their_bucketer.ReduceScatterBucketer, rank, world_size, cap, shapes, group)
    assert [i for i, _ in ours] == [i for i, _ in theirs]
    everyone = [_inputs(r, world_size, shapes) for r in range(world_size)]
    for (i, mine), (_, other) in zip(ours, theirs, strict=True):
        if not isinstance(mine, torch.Tensor):
            continue
        truth = (
            sum(everyone[r][i][rank] for r in range(world_size))
            if i >= 0
            else torch.full((2,), 1.0 * world_size)
        )
        torch.testing.assert_close(mine, truth)
        torch.testing.assert_close(other, truth)


@pytest.mark.parametrize(("world_size", "cap"), [(2, 25), (2, 0), (3, 1), (2, 8 / 2**20), (2, 48 / 2**20)])
def test_reduce_scatter_bucketer(world_size: int, cap: float) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (200_000,), (2, 2), (80_000,), (40_000,), (5,)]
    rank_pool(world_size, "gloo").run(_bucketer_ranks, world_size, cap, shapes)


# ------------------------------------------------------------------ layerwise scaling
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x)))


def _layerwise(cls: Any, steps: list[int | None], **options: Any) -> list[Any]:
    """Parameters and factors of each step; ``steps`` names the parameter whose gradient overflows, or None."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cls(model, {"first": 2.0**4, "body.0": 2.0**3, "last": 2.0**2}, **options)
    seen: list[Any] = []
    for step, overflow in enumerate(steps):
        optimizer.zero_grad()
        scaler.scale()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        (model(x).pow(2).mean() * scaler.get_layer_info()[-1].scaling_factor).backward()
        if overflow is not None:
            list(model.parameters())[overflow].grad.view(-1)[0] = math.inf
        scaler.unscale()
        grads = [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        info = [
            (i.layer_name, i.scaling_factor, i.found_inf_or_nan, i.growth_tracker) for i in scaler.layer_info
        ]
        seen.append((grads, copy.deepcopy(list(model.parameters())), info))
    return seen


def test_layerwise_scaler_as_fairscale() -> None:
    options = {"growth_interval": 2, "growth_factor": 4.0, "max_scale": 100.0, "min_scale": 3.0}
    for ours, theirs in zip(
        _layerwise(LayerwiseGradientScaler, [None] * 5, **options),
        _layerwise(their_layerwise.LayerwiseGradientScaler, [None] * 5, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours[:2], theirs[:2])
        assert ours[2] == theirs[2]


def test_layerwise_scaler_after_an_overflow() -> None:
    """Factors go as fairscale's; its next step has gradients that are still scaled, ours the true ones."""
    steps = [None, 2, None, None]
    ours = _layerwise(LayerwiseGradientScaler, steps, growth_interval=2)
    theirs = _layerwise(their_layerwise.LayerwiseGradientScaler, steps, growth_interval=2)
    assert [info for *_, info in ours] == [info for *_, info in theirs]
    first = ours[0]
    torch.testing.assert_close(ours[1][1], first[1])  # no step
    torch.manual_seed(0)
    model = Net()
    for p, q in zip(model.parameters(), first[1], strict=True):
        p.data.copy_(q)
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(2))).pow(2).mean().backward()
    expected = [p.grad for p in model.parameters()]
    torch.testing.assert_close(ours[2][0], expected)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(theirs[2][0], expected)
