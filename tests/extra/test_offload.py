"""A model whose slices come and go equals the model; cpu:0 is another device than cpu to torch, so tensors do move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import LifecycleError
from shardkit.experimental.nn import OffloadModel
from shardkit.experimental.nn.auto_shard import shard_model
from shardkit.experimental.nn.offload import ModelShard
from shardkit.torch_seams.tensors import LiveTensors

ELSEWHERE = torch.device("cpu:0")
DEVICES = [torch.device("cpu"), ELSEWHERE]
if torch.cuda.is_available():
    DEVICES.append(torch.device("cuda"))


def _model(inplace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(inplace=inplace),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.ReLU(inplace=inplace),
        nn.Linear(8, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 1),
    )


def _train(model: nn.Module, steps: int = 3, accumulate: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of inputs, with gradients of two batches for each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        for _ in range(accumulate):
            x = torch.randn(8, 4, requires_grad=True)
            y = model(x)
            assert y.shape == (8, 1)
            loss = (y.sin() + y.pow(2)).mean()
            loss.backward()
            found += [loss.detach().cpu(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("slices", [1, 3, 20])
def test_equals_the_model(device: torch.device, checkpoint: bool, slices: int) -> None:
    plain = _model()
    model = OffloadModel(
        _model(inplace=not checkpoint), device, num_slices=slices, checkpoint_activation=checkpoint
    )
    truth = _train(plain)
    got = _train(model)
    if device.type == "cpu":
        for a, b in zip(got, truth, strict=True):
            torch.testing.assert_close(a, b)
        for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.device.type == "cpu"
    torch.testing.assert_close(
        model.eval()(torch.ones(2, 4)).cpu(), plain.eval()(torch.ones(2, 4)), atol=1e-2, rtol=1e-2
    )


def _microbatched(plain: nn.Module, x: torch.Tensor, parts: int) -> torch.Tensor:
    return torch.cat([plain(part) for part in x.chunk(parts)])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_microbatches(checkpoint: bool) -> None:
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)]
    plain = nn.Sequential(*layers)
    model = OffloadModel(
        nn.Sequential(*layers), ELSEWHERE, num_slices=2, checkpoint_activation=checkpoint, num_microbatches=3
    )
    x = torch.randn(7, 4)
    truth = torch.autograd.grad(_microbatched(plain, x, 3).pow(3).sum(), list(plain.parameters()))
    y = model(x)
    torch.testing.assert_close(y, plain(x))
    y.pow(3).sum().backward()
    for p, g in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(p.grad, g)


class _Two(nn.Module):
    """Two tensors and a number in, the same out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.linear(a) + b, b * a.sin(), n + 1


@pytest.mark.parametrize("checkpoint", [False, True])
def test_slices_with_several_values(checkpoint: bool) -> None:
    parts: list[Any] = [_Two() for _ in range(3)]
    model = OffloadModel(list(parts), ELSEWHERE, checkpoint_activation=checkpoint)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    values: Any = (a, b, 0)
    for part in parts:
        values = part(*values)
    params = [p for part in parts for p in part.parameters()]
    truth = torch.autograd.grad((values[0] * values[1]).sum(), params)
    x, y, n = model(a, b, 0)
    assert n == 3
    (x * y).sum().backward()
    for p, g in zip(params, truth, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_inputs_of_integers_and_tied_parameters() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Embedding(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
        model[3].weight = model[0].weight
        return model

    plain, model = tied(), OffloadModel(tied(), ELSEWHERE, num_slices=3)
    tokens = torch.tensor([[1, 2], [5, 1]])
    for m in (plain, model):
        m(tokens).pow(2).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for shard in model.model_slices:
        assert shard._resting is None  # all are where they rest


def test_weights_are_not_kept_by_the_graph() -> None:
    def peak(slices: int) -> tuple[int, int]:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
        model = OffloadModel(nn.Sequential(*layers), ELSEWHERE, num_slices=slices)
        x = torch.randn(2, 64)
        with LiveTensors() as live:
            live.add(list(model.parameters()))
            resting = live.bytes
            y = model(x)
            after_forward = live.bytes - resting
            y.sum().backward()
        return after_forward, live.peak - resting

    weight = 64 * 64 * 4
    after_forward, peak_bytes = peak(8)
    assert after_forward < weight  # activations alone
    # a slice's weight and gradient on the device, and all gradients where they rest
    assert peak_bytes < 8 * weight + 4 * weight
    assert peak(1)[1] > 8 * weight + 8 * weight


def test_weights_changed_between_forward_and_backward() -> None:
    model = OffloadModel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ELSEWHERE, num_slices=2)
    y = model(torch.randn(2, 3))
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
        model.model_slices[1].model_shard[0].weight.add_(1)
    with pytest.raises(LifecycleError, match="after backward"):
        y.sum().backward()


def test_names_and_slices_are_fairscales() -> None:
    model = OffloadModel(_model(), torch.device("cpu"), num_slices=3)
    assert "_model.0.model_shard.0.weight" in model.state_dict()
    assert [len(s.model_shard) for s in model.model_slices] == [3, 1, 5]  # about a third each
    shard = model.model_slices[0]
    assert isinstance(shard, ModelShard)
    for method in (
        shard.forward_load,
        shard.forward_drop,
        shard.backward_load,
        shard.backward_drop,
        shard.to_device,
    ):
        method()


def test_auto_shards_can_be_offloaded() -> None:
    plain = _model().eval()
    model = OffloadModel(shard_model(plain, 3), ELSEWHERE)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": None, "device": torch.device("cpu")},
        {"model": nn.Linear(1, 1), "device": torch.device("cpu")},
        {"model": nn.Sequential(), "device": torch.device("cpu")},
        {"model": nn.Sequential(nn.Linear(1, 1)), "device": None},
        {"model": nn.Sequential(nn.Linear(1, 1)), "device": torch.device("cpu"), "num_microbatches": 0},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"OffloadModel|name a device"):
        OffloadModel(**arguments)
