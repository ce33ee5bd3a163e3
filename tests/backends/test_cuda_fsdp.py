"""FSDP on CUDA devices against one process on the CPU; one device shows all but the communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from shardkit.backend import get_backend
from tests.fsdp_models import MODELS, batch, build
from tests.pools import rank_pool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
worlds = pytest.mark.parametrize(
    "world_size",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
        ),
    ],
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard": ReshardPolicy(after_forward=False)},
    "two ahead": {"reshard": ReshardPolicy(prefetch=2)},
    "offloaded": {"offload": OffloadPolicy(parameters=True)},
    "bf16": {
        "precision": PrecisionPolicy(compute=torch.bfloat16),
        "reduce": ReducePolicy(dtype=torch.float32),
    },
}


def _train(rank: int, world_size: int, name: str, options: str) -> None:
    device = get_backend("cuda").device()
    make, wrap = MODELS[name]
    plain = build(make)
    given = dict(OPTIONS[options])
    if options == "offloaded":
        given["device"] = device
    model = build(make).to(device)
    if name.startswith("tied"):
        model.head.weight = model.embed.weight
    model = wrap(model, lambda m: FSDP(m, **given))
    first = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        xs = batch(step, world_size)
        first.zero_grad()
        second.zero_grad()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        model(xs[rank].to(device)).float().pow(2).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        model.clip_grad_norm_(0.5)
        first.step()
        second.step()
    tolerance = 3e-2 if options == "bf16" else 1e-4
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[key].cpu(),
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@worlds
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["tied_across", "checkpoint_reentrant", "adapted", "twice", "attention"])
def test_trains_as_one_process(name: str, options: str, world_size: int) -> None:
    rank_pool(world_size, "cuda").run(_train, world_size, name, options)


def _memory(rank: int) -> None:
    """Parameters that are not gathered have no memory."""
    device = get_backend("cuda").device()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(device)
    for i in range(8):
        model[i] = FSDP(model[i], precision=PrecisionPolicy(compute=torch.bfloat16))
    model = FSDP(model)
    x = torch.randn(4, 1024, device=device)
    for _ in range(3):
        model(x).float().sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    shards = sum(p.numel() * 4 for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert before < shards * 1.1 + 2**22
    with torch.no_grad():
        model(x)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * 1024 * 1024 * 2 * 1.3 + 2**22  # one unit that computes and one that is being gathered


def test_memory_of_resharded_units_is_given_back() -> None:
    rank_pool(1, "cuda").run(_memory)
