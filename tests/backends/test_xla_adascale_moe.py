"""AdaScale and mixtures of experts on XLA replicas, against the formulas and one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkit.backend import get_backend
from shardkit.nn import MOELayer, ShardedDataParallel
from shardkit.optim import OSS, AdaScale
from tests.adascale import test_adascale as adascale_truth
from tests.moe import test_moe as moe_truth
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def _train(rank: int, counts: tuple[int, int]) -> Any:
    groups, accumulated = counts
    backend = get_backend("xla")
    model = adascale_truth.Model().to(backend.device())
    optimizer = OSS(model.groups(groups), lr=0.1, momentum=0.9)
    wrapper = ShardedDataParallel(model, optimizer)
    adascale = AdaScale(optimizer, num_gradients_to_accumulate=accumulated, smoothing=0.6)
    gains = []
    for step in range(3):
        for k in range(accumulated):
            loss = adascale_truth.loss_of(lambda x: wrapper(x.to(backend.device())).cpu(), step, k, rank)
            (loss / accumulated).backward()
        gains.append([adascale.gain(), *(adascale.gain(g) for g in range(groups))])
        adascale.step()
        adascale.zero_grad()
        backend.mark_step()
    return gains, {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("counts", [(1, 1), (2, 2)])
def test_adascale(counts: tuple[int, int]) -> None:
    gains, model = adascale_truth.truth(2, 3, *counts, smoothing=0.6)
    for own, state in rank_pool(2, "xla").run(_train, counts):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(gains), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-6, atol=1e-8)


def _experts(rank: int) -> Any:
    device = get_backend("xla").device()
    experts = torch.nn.ModuleList(moe_truth.expert_of(2 * rank + k, 4, torch.float32) for k in range(2)).to(
        device
    )
    layer = MOELayer(moe_truth.QuietGate(4, 4), experts)
    x = moe_truth.inputs_of(rank, (2, 4, 4), torch.float32).detach().to(device).requires_grad_()
    y = layer(x)
    y.sum().backward()
    return y.detach().cpu(), x.grad.cpu()


def test_experts() -> None:
    for rank, (y, grad) in enumerate(rank_pool(2, "xla").run(_experts)):
        x = moe_truth.inputs_of(rank, (2, 4, 4), torch.float32)
        rows = [moe_truth.expert_of(s % 4, 4, torch.float32)(token) for s, token in enumerate(x.view(-1, 4))]
        expected = torch.stack(rows)
        expected.sum().backward()
        torch.testing.assert_close(y.view(-1, 4), expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-5)
