"""Model parallelism against the unsharded modules, at sizes 1, 2 and 4: values, gradients, groups, refusals.

All programs run on 4 ranks; what is not a part of the model is a replica of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkit import model_parallel as mp
from shardkit.errors import ConfigurationError, LifecycleError, RankMismatchError
from shardkit.model_parallel import groups, layers, regions
from shardkit.model_parallel.groups import VocabUtility, split_tensor_along_last_dim
from tests.llama import ParallelLayers, PlainLayers, Size, Transformer, load_part, part_of
from tests.pools import on_ranks, rank_pool

WORLD = 4
sizes = pytest.mark.parametrize("size", [1, 2, 4])
assert_close = torch.testing.assert_close


@contextlib.contextmanager
def parallel(size: int, pipeline: int = 1, context: int = 1, **options: Any) -> Iterator[tuple[int, int]]:
    """(this rank's part, number of parts); the same random numbers on all ranks."""
    mp.initialize_model_parallel(size, pipeline, context, **options)
    torch.manual_seed(7)
    try:
        yield mp.get_model_parallel_rank(), size
    finally:
        mp.destroy_model_parallel()


def run(program: Callable[..., Any], *args: Any) -> list[Any]:
    return rank_pool(WORLD).run(program, *args)


def refused(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()


# ------------------------------------------------------------------------------------------ groups
@pytest.mark.parametrize(
    ("world", "size", "stages", "context"),
    [(w, s, p, c) for w in (1, 4, 6, 24) for s in (1, 2, 3) for p in (1, 2) for c in (1, 2)],
)
def test_grid(world: int, size: int, stages: int, context: int) -> None:
    """Every kind of group holds every rank once; two ranks share at most one group."""
    if world % (size * stages * context):
        refused(ConfigurationError, "not divisible", lambda: groups.grid(world, size, stages, context))
        return
    made = groups.grid(world, size, stages, context)
    for lines, length in (
        (made.model, size),
        (made.context, context),
        (made.pipeline, stages),
        (made.data, world // size // stages // context),
    ):
        assert {len(line) for line in lines} == {length}
        assert sorted(itertools.chain(*lines)) == list(range(world))
    pairs = [p for lines in (made.model, made.context, made.pipeline, made.data) for line in lines
             for p in itertools.combinations(line, 2)]  # fmt: skip
    assert len(pairs) == len(set(pairs))
    assert all(line == list(range(line[0], line[0] + size)) for line in made.model)


def test_grid_of_8_ranks() -> None:
    made = groups.grid(8, 2, 2)
    assert made.model == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.pipeline == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert made.data == [[0, 4], [1, 5], [2, 6], [3, 7]]
    made = groups.grid(8, 2, 1, 2)  # fairscale's head: [data, pipeline, context, model]
    assert made.model == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.context == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert made.pipeline == [[r] for r in range(8)]
    assert made.data == [[0, 4], [1, 5], [2, 6], [3, 7]]


def _shares_sequences(rank: int) -> None:
    """Two parts of a model, and two ranks for the halves of each sequence, have the gradients of one process."""
    import torch.distributed as dist

    sequences = torch.randn(3, 6, 4, dtype=torch.double)  # [B, T, D]
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    up = mp.ColumnParallelLinear(4, 8, gather_output=False).double()
    down = mp.RowParallelLinear(8, 4, input_is_parallel=True).double()
    part = slice(mp.get_model_parallel_rank() * 4, mp.get_model_parallel_rank() * 4 + 4)
    with torch.no_grad():
        up.weight.copy_(plain[0].weight[part])
        up.bias.copy_(plain[0].bias[part])
        down.weight.copy_(plain[2].weight[:, part])
        down.bias.copy_(plain[2].bias)
    plain(sequences).square().mean().backward()
    first = mp.get_context_parallel_rank() * 3
    down(torch.tanh(up(sequences[:, first : first + 3]))).square().mean().backward()
    want = (
        plain[0].weight.grad[part],
        plain[0].bias.grad[part],
        plain[2].weight.grad[:, part],
        plain[2].bias.grad,
    )
    for param, grad in zip((up.weight, up.bias, down.weight, down.bias), want, strict=True):
        dist.all_reduce(param.grad, group=mp.get_context_parallel_group())
        assert_close(param.grad / mp.get_context_parallel_world_size(), grad)


@on_ranks(WORLD)
def test_groups(rank: int) -> None:
    import torch.distributed as dist

    assert not mp.model_parallel_is_initialized()
    refused(LifecycleError, "call initialize_model_parallel", mp.get_model_parallel_rank)
    refused(AssertionError, "call initialize_model_parallel", mp.get_data_parallel_group)
    with parallel(2):
        assert (mp.get_model_parallel_rank(), mp.get_model_parallel_world_size()) == (rank % 2, 2)
        assert (mp.get_data_parallel_rank(), mp.get_data_parallel_world_size()) == (rank // 2, 2)
        assert mp.get_model_parallel_src_rank() == rank // 2 * 2
        assert mp.get_pipeline_parallel_ranks() == [rank]
        value = torch.tensor([float(rank)])
        dist.broadcast(value, mp.get_model_parallel_src_rank(), group=mp.get_model_parallel_group())
        assert value.item() == rank // 2 * 2
        refused(LifecycleError, "of size 2 exist already", lambda: mp.initialize_model_parallel(2))
        held = mp.get_data_parallel_group()
    dist.all_reduce(value, group=held)  # who holds a group can go on using it
    assert value.item() == 2
    with parallel(2, 2):
        assert mp.get_pipeline_parallel_ranks() == [rank % 2, rank % 2 + 2]
        assert mp.get_data_parallel_world_size() == 1
        assert dist.get_world_size(mp.get_pipeline_parallel_group()) == 2
    with parallel(1, 1, 2, cp_backend="gloo", timeout=timedelta(seconds=100)):
        assert mp.get_context_parallel_ranks() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (mp.get_context_parallel_rank(), mp.get_context_parallel_world_size()) == (rank % 2, 2)
        assert mp.get_data_parallel_ranks() == [rank % 2, rank % 2 + 2]
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=mp.get_context_parallel_group())
        assert value.item() == rank // 2 * 4 + 1
    with parallel(64):  # at most all ranks
        assert mp.get_model_parallel_world_size() == 4

    with parallel(2, 1, 2):
        _shares_sequences(rank)


@on_ranks(WORLD)
def test_refused_sizes(rank: int) -> None:
    refused(ConfigurationError, "4 is not divisible by 3", lambda: mp.initialize_model_parallel(3))
    refused(
        AssertionError,
        "4 is not divisible by 8",
        lambda: mp.initialize_model_parallel(4, pipeline_length=2),
    )
    refused(ConfigurationError, "at least 1", lambda: mp.initialize_model_parallel(0))
    assert not mp.model_parallel_is_initialized()
    refused(
        RankMismatchError,
        "model_parallel_size_=1.*model_parallel_size_=2|model_parallel_size_=2.*model_parallel_size_=1",
        lambda: mp.initialize_model_parallel(1 if rank == 3 else 2),
    )
    with parallel(2):
        for make in (
            lambda: mp.ColumnParallelLinear(4, 5),
            lambda: mp.RowParallelLinear(5, 4),
            lambda: mp.ParallelEmbedding(4, 5),
            lambda: mp.VocabParallelEmbedding(5, 4),
        ):
            refused(ConfigurationError, "5 is not divisible by 2", make)
        refused(
            ConfigurationError, "3 is not divisible by 2", lambda: mp.ColumnParallelLinear(4, 6, stride=2)
        )
        refused(
            ConfigurationError,
            "7 is not divisible by 2",
            lambda: mp.scatter_to_model_parallel_region(torch.ones(2, 7)),
        )
        refused(ConfigurationError, "padding_idx is 6", lambda: mp.ParallelEmbedding(6, 4, padding_idx=6))
        refused(
            ConfigurationError,
            r"\(2, 3, 4\) and targets \(2, 2\)",
            lambda: mp.vocab_parallel_cross_entropy(torch.ones(2, 3, 4), torch.ones(2, 2).long()),
        )


def test_before_torch_distributed() -> None:
    refused(LifecycleError, "init_process_group", lambda: mp.initialize_model_parallel(1))
    assert not mp.model_parallel_is_initialized()


def test_partition() -> None:
    x = torch.arange(12.0).view(2, 6)
    parts = split_tensor_along_last_dim(x, 3)
    assert all(part.data_ptr() == x[:, 2 * i].data_ptr() for i, part in enumerate(parts))
    assert all(part.is_contiguous() for part in split_tensor_along_last_dim(x, 3, True))
    assert_close(torch.cat(parts, -1), x)
    ranges = [VocabUtility.vocab_range_from_global_vocab_size(12, r, 3) for r in range(3)]
    assert ranges == [(0, 4), (4, 8), (8, 12)]


# ------------------------------------------------------------------------------------------ regions
@sizes
@on_ranks(WORLD)
def test_regions(rank: int, size: int) -> None:
    with parallel(size) as (part, parts):
        whole = torch.randn(3, 8, dtype=torch.float64)
        noise = torch.randn(parts, 3, 8, dtype=torch.float64)
        mine = noise[part]

        x = whole.clone().requires_grad_()
        y = mp.copy_to_model_parallel_region(x)
        # the gradient is shared with a second branch, which must not see the sum
        ((y + x) * mine).sum().backward()
        assert_close(y, whole)
        assert_close(x.grad, noise.sum(0) + mine)

        x = mine.clone().requires_grad_()
        y = mp.reduce_from_model_parallel_region(x)
        (y * whole).sum().backward()
        assert_close(y, noise.sum(0))
        assert_close(x, mine)  # left alone
        assert_close(x.grad, whole)

        x = whole.clone().requires_grad_()
        y = mp.scatter_to_model_parallel_region(x)
        assert y.is_contiguous()
        (y * part_of("w2.", whole * 2, part, parts)).sum().backward()
        assert_close(y, whole.chunk(parts, -1)[part])
        assert_close(x.grad, whole * 2)

        x = whole.chunk(parts, -1)[part].clone().requires_grad_()
        y = mp.gather_from_model_parallel_region(x)
        (y * whole).sum().backward()
        assert_close(y, whole)
        assert_close(x.grad, whole.chunk(parts, -1)[part])

        # any strides, any dtype that holds numbers, no gradient at all
        assert_close(mp.gather_from_model_parallel_region(mine.t()), torch.cat([n.t() for n in noise], -1))
        assert_close(
            mp.gather_from_model_parallel_region(mine[:, :1]), torch.cat([n[:, :1] for n in noise], -1)
        )
        assert_close(
            mp.gather_from_model_parallel_region(mine[:, 0]), torch.cat([n[:, 0] for n in noise], -1)
        )
        assert_close(mp.reduce_from_model_parallel_region(torch.arange(5)), torch.arange(5) * parts)
        x = torch.ones(parts, requires_grad=True)
        mp.scatter_to_model_parallel_region(x).sum().backward()  # expanded
        assert_close(x.grad, torch.ones(parts))
        mp.copy_to_model_parallel_region(x).sum().backward()  # an expanded gradient


@sizes
@on_ranks(WORLD)
def test_gradients_of_gradients(rank: int, size: int) -> None:
    """sum over ranks of f(part) for the whole of it, f(x) = x**3: its second derivative is 6 x."""
    with parallel(size):
        whole = torch.randn(8, dtype=torch.float64, requires_grad=True)
        y = mp.scatter_to_model_parallel_region(whole)
        value = mp.reduce_from_model_parallel_region((y**3).sum())
        (first,) = torch.autograd.grad(value, whole, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), whole)
        assert_close(first, 3 * whole**2)
        assert_close(second, 6 * whole)


# ------------------------------------------------------------------------------------------ layers
def _start_values(rank: int, size: int) -> list[torch.Tensor]:
    """Whole weights after drawing them in parts."""
    with parallel(size):
        column = mp.ColumnParallelLinear(6, 8, keep_master_weight_for_test=True)
        row = mp.RowParallelLinear(8, 6, init_method=nn.init.kaiming_uniform_)
        assert row.master_weight is None
        assert column.master_weight is not None
        assert_close(column.master_weight, column.get_master_weight())
        assert list(column.state_dict()) == ["weight", "bias"]
        tokens = torch.arange(12)
        with torch.no_grad():
            by_row = mp.VocabParallelEmbedding(12, 8)(tokens)
            by_column = mp.ParallelEmbedding(12, 8)(tokens)
        return [column.get_master_weight(), row.get_master_weight(), by_row, by_column, torch.rand(1)]


def test_start_values_do_not_depend_on_the_size() -> None:
    """And the generator is where one process's would be."""
    torch.manual_seed(7)
    truth = [
        nn.init.xavier_normal_(torch.empty(8, 6)),
        nn.init.kaiming_uniform_(torch.empty(6, 8)),
        nn.init.xavier_normal_(torch.empty(12, 8)),
        nn.init.xavier_normal_(torch.empty(12, 8)),
        torch.rand(1),
    ]
    for size in (1, 2, 4):
        for values in run(_start_values, size):
            for value, expected in zip(values, truth, strict=True):
                assert torch.equal(value, expected), size


@on_ranks(WORLD)
def test_stride(rank: int) -> None:
    """With stride 3 a rank's part is a piece of each third."""
    with parallel(2) as (part, parts):
        weight = torch.empty(6, 2)
        whole = layers.initialize_affine_weight(weight, 12, 2, 6, 0, nn.init.normal_, 3, True)
        assert whole is not None
        thirds = whole.view(3, parts, 2, 2)
        assert torch.equal(weight, thirds[:, part].reshape(6, 2))


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 9},
    "padding from the end": {"padding_idx": -1},
    "sparse": {"sparse": True},
    "by frequency": {"scale_grad_by_freq": True},
    "norm": {"max_norm": 1.0},
    "norm 1": {"max_norm": 1.5, "norm_type": 1.0},
    "largest": {"max_norm": 0.5, "norm_type": float("inf")},
}


def _embedding(part: int, parts: int, kind: str, options: dict[str, Any]) -> None:
    plain = nn.Embedding(12, 8, **options).double()
    dim = 0 if kind == "vocab" else 1
    cls: Any = mp.VocabParallelEmbedding if kind == "vocab" else mp.ParallelEmbedding
    layer = cls(12, 8, **options).double()
    with torch.no_grad():
        layer.weight.copy_(plain.weight.chunk(parts, dim)[part])
    for tokens in (torch.tensor([[1, 9, 9], [4, 11, 1]]), torch.tensor([2, 2])):  # one rank has none of these
        layer.weight.grad = plain.weight.grad = None
        truth, y = plain(tokens), layer(tokens)
        assert_close(y, truth)
        weights = torch.randn(truth.shape, dtype=torch.float64)
        (truth * weights).sum().backward()
        (y * weights).sum().backward()
        mine, whole = layer.weight.grad, plain.weight.grad
        assert mine.is_sparse == whole.is_sparse
        assert_close(mine.to_dense(), whole.to_dense().chunk(parts, dim)[part])
        assert_close(layer.weight, plain.weight.chunk(parts, dim)[part])  # max_norm writes to it


@sizes
@pytest.mark.parametrize("kind", ["vocab", "columns"])
@on_ranks(WORLD)
def test_embedding(rank: int, size: int, kind: str) -> None:
    with parallel(size) as (part, parts):
        for options in EMBEDDINGS.values():
            _embedding(part, parts, kind, options)


# ------------------------------------------------------------------------------------------ cross entropy
def _cross_entropy(part: int, parts: int, shape: tuple[int, ...]) -> None:
    whole = (torch.randn(*shape, 12, dtype=torch.float64) * 30).requires_grad_()
    target = torch.randint(12, shape)
    logits = whole.detach().chunk(parts, -1)[part].clone().requires_grad_()
    before = logits.detach().clone()
    loss = mp.vocab_parallel_cross_entropy(logits, target)
    truth = F.cross_entropy(whole.view(-1, 12), target.view(-1), reduction="none").view(shape)
    assert_close(loss, truth)
    assert torch.equal(logits, before)
    weights = torch.randn(shape, dtype=torch.float64)
    (truth * weights).sum().backward()
    total = (loss * weights).sum()
    total.backward(retain_graph=True)
    expected = whole.grad.chunk(parts, -1)[part]
    assert_close(logits.grad, expected)
    total.backward()
    assert_close(logits.grad, 2 * expected)


@sizes
@on_ranks(WORLD)
def test_cross_entropy(rank: int, size: int) -> None:
    with parallel(size) as (part, parts):
        for shape in ((5,), (2, 3), ()):
            _cross_entropy(part, parts, shape)


# ------------------------------------------------------------------------------------------ a model
@sizes
@on_ranks(WORLD)
def test_llama(rank: int, size: int) -> None:
    with parallel(size) as (part, parts):
        plain = Transformer(Size(), PlainLayers).double()
        model = Transformer(Size(), ParallelLayers(layers), parts).double()
        load_part(model, plain, part, parts)
        tokens, target = torch.randint(36, (2, 9)), torch.randint(36, (2, 9))
        for _ in range(2):
            truth, logits = plain(tokens), model(tokens)
            assert_close(logits, truth)
            for m, y in ((plain, truth), (model, logits)):
                m.zero_grad()
                F.cross_entropy(y.flatten(0, 1), target.flatten()).backward()
                torch.optim.SGD(m.parameters(), 0.1).step()
            parameters = dict(plain.named_parameters())
            for name, p in model.named_parameters():
                assert_close(p.grad, part_of(name, parameters[name].grad, part, parts), msg=name)
                assert_close(p, part_of(name, parameters[name], part, parts), msg=name)


@on_ranks(WORLD)
def test_compiled(rank: int) -> None:
    with parallel(2):
        model: Any = nn.Sequential(
            mp.ColumnParallelLinear(8, 12, gather_output=False), nn.GELU(),
            mp.RowParallelLinear(12, 8, input_is_parallel=True),
        )  # fmt: skip
        x = torch.randn(3, 8)
        truth = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
        compiled = torch.compile(model, backend="aot_eager")
        found = torch.autograd.grad(compiled(x).pow(2).sum(), list(model.parameters()))
        assert_close(found, truth)


# ------------------------------------------------------------------------------------------ random numbers
def _random(rank: int) -> list[float]:
    with parallel(2):
        tracker = mp.get_cuda_rng_tracker()
        torch.manual_seed(3)
        mp.model_parallel_cuda_manual_seed(11)
        outside = torch.rand(1).item()
        with tracker.fork():
            first = torch.rand(1).item()
        with pytest.raises(ZeroDivisionError), tracker.fork():
            raise ZeroDivisionError
        with tracker.fork():
            second = torch.rand(1).item()
        torch.manual_seed(3)
        assert outside == torch.rand(1).item()
        torch.manual_seed(11 + 2718 + mp.get_model_parallel_rank())
        assert [first, second] == [torch.rand(1).item(), torch.rand(1).item()]
        refused(ConfigurationError, "no random state named 'x'", lambda: tracker.fork("x").__enter__())
        refused(ConfigurationError, "already exists", lambda: tracker.add("model-parallel-rng", 1))
        own = 11 + 2718 + mp.get_model_parallel_rank()
        refused(ConfigurationError, f"seed {own} already", lambda: tracker.add("x", own))
        states = tracker.get_states()
        tracker.reset()
        assert not tracker.get_states()
        tracker.set_states(states)
        with tracker.fork():
            third = torch.rand(1).item()
        tracker.reset()
        return [first, second, third]


def test_random() -> None:
    draws = run(_random)
    assert draws[0] == draws[2]
    assert draws[1] == draws[3]
    assert not set(draws[0]) & set(draws[1])


@on_ranks(WORLD)
def test_checkpoint(rank: int) -> None:
    with parallel(2):
        mp.model_parallel_cuda_manual_seed(5)
        tracker = mp.get_cuda_rng_tracker()
        up = mp.ColumnParallelLinear(8, 12, gather_output=False)
        down = mp.RowParallelLinear(12, 8, input_is_parallel=True)
        calls = []

        def function(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(torch.is_grad_enabled())
            with tracker.fork():
                y = F.dropout(up(x), p)
            return F.dropout(down(y), p), x * 2

        results = []
        x = torch.randn(4, 8)
        checkpointed = partial(mp.checkpoint, function)
        for call in (function, checkpointed, partial(mp.checkpoint, checkpointed)):
            torch.manual_seed(1)
            mp.model_parallel_cuda_manual_seed(5)
            inputs = x.clone().requires_grad_()
            y, _ = call(inputs, 0.5)
            after = torch.rand(1)
            y.pow(2).sum().backward()
            with tracker.fork():
                inside = torch.rand(1)
            grads = [p.grad.clone() for m in (up, down) for p in m.parameters()]
            up.zero_grad(), down.zero_grad()
            results.append([y.detach(), inputs.grad, after, inside, torch.rand(1), *grads])
        assert calls == [True, False, True, False, False, True]
        assert all(torch.equal(a, same) for a, *others in zip(*results, strict=True) for same in others)
        # only parameters have gradients
        mp.checkpoint(function, x, 0.0)[0].sum().backward()
        assert up.weight.grad is not None
        with torch.no_grad():
            assert not mp.checkpoint(function, x, 0.0)[0].requires_grad
        y = mp.checkpoint(function, inputs, 0.0)[0].sum()
        refused(LifecycleError, "Call backward", lambda: torch.autograd.grad(y, inputs))
        tracker.reset()


@on_ranks(WORLD)
def test_sums_of_layers_are_in_place(rank: int) -> None:
    """[Note: in place]: a layer's sums need no second tensor, and still nobody else's tensor changes."""
    with parallel(2):
        row = mp.RowParallelLinear(8, 6, bias=False, input_is_parallel=True)
        seen: list[int] = []
        original = regions.sum_over_ranks

        def spy(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            result = original(tensor, **kwargs)
            seen.append(result.data_ptr() == tensor.data_ptr())
            return result

        regions.sum_over_ranks = spy  # type: ignore[assignment]
        try:
            x = torch.randn(3, 4, requires_grad=True)
            row(x).sum().backward()
            column = mp.ColumnParallelLinear(4, 6)
            column(x).sum().backward()
        finally:
            regions.sum_over_ranks = original
        assert seen == [True, True]
