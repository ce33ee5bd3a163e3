"""Batch norm over ranks equals batch norm of the whole batch in one process, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.backend import get_backend
from shardkit.experimental.nn import SyncBatchNorm
from shardkit.experimental.nn.sync_batchnorm import batch_statistics
from shardkit.nn.checkpoint import checkpoint_wrapper
from tests.backends.environments import environments
from tests.pools import on_ranks

EACH = [p for p in environments("gloo", "simulated", "xla") if p.values[1] in (2, 3)]
SIZES = {2: [3, 2], 3: [4, 0, 1]}  # of the ranks' batches
CHANNELS = 3


def _batch(sizes: list[int], rank: int | None, trailing: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All of it, or a rank's part."""
    torch.manual_seed(3)
    whole = torch.randn(sum(sizes), CHANNELS, *trailing) * torch.tensor([1.0, 5.0, 0.5]).view(
        -1, *[1] * len(trailing)
    )
    whole = (whole + 2).to(dtype)
    return whole if rank is None else whole.split(sizes)[rank]


def _layer(kind: Any, options: dict[str, Any]) -> Any:
    layer = kind(CHANNELS, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return layer


def _run(layer: Any, batches: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Outputs, gradients of inputs, parameters and buffers after some steps."""
    found = []
    for i, batch in enumerate(batches):
        x = batch.to(device).requires_grad_()
        y = layer(x)
        ((y * (i + 1)).sin() * y).sum().backward()
        found += [y, x.grad]
    return [t.detach().cpu() for t in found]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_affine": {"affine": False},
    "no_tracking": {"track_running_stats": False},
    "cumulative": {"momentum": None},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(*EACH)
def test_equals_the_whole_batch(rank: int, world_size: int, backend: str, options: str) -> None:
    trailing = (2, 5) if options == "plain" else ()
    sizes, device = SIZES[world_size], get_backend(backend).device()
    dtype = torch.float32
    parts = [_batch(sizes, rank, trailing, dtype), _batch(sizes, rank, trailing, dtype) * 2]
    wholes = [_batch(sizes, None, trailing, dtype), _batch(sizes, None, trailing, dtype) * 2]
    layer = _layer(SyncBatchNorm, OPTIONS[options]).to(device)
    truth = _layer({0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(trailing)], OPTIONS[options])
    mine, everybody = (
        _run(layer, parts, device),
        _run(truth.double(), [w.double() for w in wholes], torch.device("cpu")),
    )
    for got, expected in zip(mine, everybody, strict=True):
        torch.testing.assert_close(got, expected.split(sizes)[rank].float(), atol=2e-4, rtol=1e-4)
    for (name, got), expected in zip(layer.named_buffers(), truth.buffers(), strict=True):
        torch.testing.assert_close(got.cpu(), expected.to(got.dtype), atol=1e-4, rtol=1e-5, msg=name)
    group = get_backend(backend).group()
    for p, expected in zip(layer.parameters(), truth.parameters(), strict=True):
        total = p.grad.clone()
        group.all_reduce(total, label="test")
        torch.testing.assert_close(total.cpu(), expected.grad.float(), atol=2e-3, rtol=1e-4)


@on_ranks(2)
def test_variances_of_values_far_from_zero(rank: int) -> None:
    x = _batch([3, 2], None, (7,), torch.float32) + 3000
    statistics = batch_statistics(x.split([3, 2])[rank], get_backend("gloo").group())
    var, mean = torch.var_mean(x.double(), [0, 2], correction=0)
    torch.testing.assert_close(statistics.mean, mean.float())
    torch.testing.assert_close(statistics.var, var.float(), atol=0, rtol=1e-4)
    assert statistics.total.item() == 35


@on_ranks(2)
def test_conversion_keeps_parameters_sharing_and_mode(rank: int) -> None:
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.BatchNorm2d(2), shared)).eval()
    state, bias = list(model.state_dict()), shared.bias
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == state
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1] is model[2][1]
    assert model[1].bias is bias
    assert not model[1].training
    x = torch.randn(3, 4)
    torch.testing.assert_close(model[1](x), shared(x))  # eval mode: no other rank is asked
    if rank == 0:
        model[1](x)


class _Counting:
    """Counts a group's all-gathers."""

    def __init__(self, kind: type) -> None:
        self.kind, self.plain, self.calls = kind, kind.all_gather_into, 0

    def __enter__(self) -> _Counting:
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.plain(group, *args, **kwargs)

        self.kind.all_gather_into = counted
        return self

    def __exit__(self, *_: Any) -> None:
        self.kind.all_gather_into = self.plain


@pytest.mark.parametrize("how", ["whole", "nested", "converted later"])
@on_ranks(2)
def test_checkpointing_exchanges_and_tracks_once(rank: int, how: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        return nn.Sequential(inner, nn.BatchNorm1d(3), nn.Linear(3, 1))

    plain, wrapped = SyncBatchNorm.convert_sync_batchnorm(model()), model()
    if how != "converted later":
        wrapped = SyncBatchNorm.convert_sync_batchnorm(wrapped)
    if how == "nested":
        checkpoint_wrapper(wrapped[0])
    checkpoint_wrapper(wrapped)
    wrapped = SyncBatchNorm.convert_sync_batchnorm(wrapped)
    kind = type(get_backend("gloo").group().channel("batch norm"))
    counts = []
    for m in (plain, wrapped):
        inputs = [
            torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2)
        ]
        with _Counting(kind) as counting:
            # two forwards before a backward that goes through the second one first
            first, second = (m(x) for x in inputs)
            (first.sum() * 2 + second.pow(2).sum()).backward()
        counts.append(counting.calls)
    assert counts == [4, 4]
    for (name, p), q in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, b), c in zip(wrapped.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=name)


@on_ranks(2)
def test_half_precision_inputs_have_fp32_statistics(rank: int) -> None:
    layer = SyncBatchNorm(CHANNELS)
    x = _batch([3, 3], rank, (2,), torch.bfloat16).requires_grad_()
    y = layer(x)
    y.float().pow(2).sum().backward()
    assert y.dtype is x.grad.dtype is torch.bfloat16
    whole = _batch([3, 3], None, (2,), torch.bfloat16).float()
    torch.testing.assert_close(
        y.float(), nn.BatchNorm1d(CHANNELS)(whole).split(3)[rank], atol=2e-2, rtol=2e-2
    )


def test_without_ranks_it_is_a_batch_norm() -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
    with pytest.raises(ValueError, match=r"\[batch, 3, \.\.\.\]"):
        SyncBatchNorm(3)(torch.randn(4, 2))
