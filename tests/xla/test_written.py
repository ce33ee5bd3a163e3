"""Parameters that are written after the optimizer was made: it goes on from what they are, as torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import OSS, ShardedDDP
from shardkit.xla import xla_model as xm
from shardkit.xla.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tests.backends.environments import environments
from tests.pools import rank_pool

EACH = [p for p in environments("gloo", "xla") if p.values[1] == 2]


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _loss(model: Any, device: Any) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 12).view(4, 3).to(device)).square().mean()


def _programs(rank: int) -> list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    found = []
    for kind in ("oss", "sharded_ddp", "sharded_ddp of other values", "zero"):
        plain, device = _model(0), xm.xla_device()
        model: Any = _model(rank if "other" in kind else 0).to(device)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        if kind == "zero":
            optimizer: Any = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, grad_clipping=False, **options
            )
        else:
            optimizer = OSS(model.parameters(), torch.optim.SGD, **options)
        whole = ShardedDDP(model, optimizer) if "ddp" in kind else model
        reference = torch.optim.SGD(plain.parameters(), **options)
        for step in range(3):
            if step == 1:
                model.load_state_dict(_model(5).state_dict())
                plain.load_state_dict(_model(5).state_dict())
            if step == 2:
                with torch.no_grad():
                    model[0].weight.mul_(2)
                    plain[0].weight.mul_(2)
            for m, o, where in ((whole, optimizer, device), (plain, reference, "cpu")):
                o.zero_grad()
                _loss(m, where).backward()
                o.step()
            xm.mark_step()
        state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
        found.append((kind, state, {k: v.clone() for k, v in plain.state_dict().items()}))
    return found


@pytest.mark.parametrize(("backend", "world_size"), EACH)
def test_the_optimizer_goes_on_from_what_was_written(backend: str, world_size: int) -> None:
    for results in rank_pool(world_size, backend).run(_programs):
        for kind, found, wanted in results:
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=kind, n=key: f"{k} {n}: {m}"
                )
