"""Models, and their training by shardkit's FSDP1, by torch's and in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed import fsdp as theirs

from shardkit import torch_fsdp as ours
from shardkit.torch_fsdp import (
    OptimStateKeyType,
    wrap,
)
from tests.border.strategies import batch

FSDP = ours.FullyShardedDataParallel
TORCHS = theirs.FullyShardedDataParallel
CPU = torch.device("cpu")
INNER = wrap.ModuleWrapPolicy({nn.Sequential})


class Net(nn.Module):
    """Uneven on purpose; a unit inside of the root's, and a buffer in each."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        linear = partial(nn.Linear, device=device)
        self.first = linear(5, 7)
        self.inner = nn.Sequential(linear(7, 3, bias=False), nn.Tanh(), linear(3, 6))
        self.norm = nn.BatchNorm1d(6, device=device)
        self.last = linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.inner(self.first(x))))  # type: ignore[no-any-return]


def net() -> Net:
    """In evaluation: the mean of ranks' losses is one process's over all batches."""
    made = Net().eval()
    with torch.no_grad():
        made.norm.running_mean.fill_(0.25)
        made.norm.running_var.fill_(0.5)
    return made


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).float().square().mean() * 5


def train(model: nn.Module, ranks: Any, optimizer: Any, steps: Any = range(3)) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, r, step) for r in ranks]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(kind: Any, rank: int, **options: Any) -> tuple[Any, torch.optim.Optimizer, list[float]]:
    model = kind(net(), auto_wrap_policy=INNER, device_id=CPU, **options)
    optimizer = adam(model)
    return model, optimizer, train(model, [rank], optimizer)


def one_process(world_size: int) -> tuple[Net, torch.optim.Optimizer]:
    plain = net()
    optimizer = adam(plain)
    train(plain, range(world_size), optimizer)
    return plain, optimizer


def same(a: dict[str, Any], b: dict[str, Any], tolerance: float = 2e-6) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=tolerance, rtol=tolerance, msg=partial("{}: {}".format, name)
        )


def same_state(plain: Net, optimizer: torch.optim.Optimizer, named: dict[str, Any]) -> None:
    """An optimizer's state by names is that of one process."""
    wanted = FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=optimizer
    )
    assert set(named["state"]) == set(wanted["state"])
    for name, values in wanted["state"].items():
        same(dict(sorted(named["state"][name].items())), dict(sorted(values.items())))
    for mine, group in zip(named["param_groups"], wanted["param_groups"], strict=True):
        assert set(mine["params"]) == set(group["params"])
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in group.items() if k != "params"
        }
