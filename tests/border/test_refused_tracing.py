"""What torch can do with a plain module and not with a wrapped one: refused by name, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, OSS, ShardedDDP
from shardkit.errors import ConfigurationError

from ..pools import rank_pool


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def nested() -> FSDP:
    model = plain()
    model[0] = FSDP(model[0])
    return FSDP(model)


def inputs(rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))


# ------------------------------------------------------------ hooks
def _halve(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _hooks_on_parameters(rank: int, world: int) -> None:
    """They are refused where no gradient would be; on shards they run."""
    truth, model = plain(), nested()
    for p in (model.module[2].weight, model.module[0].module.bias):  # type: ignore[index]
        with pytest.raises(ConfigurationError, match=r"shards that the FSDP module's parameters\(\) lists"):
            p.register_post_accumulate_grad_hook(_halve)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    model(inputs(rank)).sum().backward()
    sum(truth(inputs(r)).sum() / (2 * world) for r in range(world)).backward()  # type: ignore[union-attr]
    norm = torch.stack([p.grad.norm() for p in truth.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm)

    inner = plain()
    kept = inner[0].weight.register_post_accumulate_grad_hook(
        _halve
    )  # the first one, on this rank's gradient
    wrapped: ShardedDDP | None = ShardedDDP(inner, OSS(inner.parameters(), torch.optim.SGD, lr=0.1))
    if world > 1:
        with pytest.raises(ConfigurationError, match="between backward and step"):
            inner[2].weight.register_post_accumulate_grad_hook(_halve)
    assert wrapped is not None
    wrapped(inputs(rank)).sum().backward()
    kept.remove()
    del wrapped
    inner[2].weight.register_post_accumulate_grad_hook(_halve)  # a plain module again
    inner.zero_grad()
    truth.zero_grad()
    inner(inputs()).sum().backward()
    truth(inputs()).sum().backward()
    for p, q, factor in zip(inner.parameters(), truth.parameters(), (1, 1, 2, 1), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad * factor, q.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_on_wrapped_parameters(world: int) -> None:
    rank_pool(world).run(_hooks_on_parameters, world)


# ------------------------------------------------------------ lazy modules
class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ready, self.norm = nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)


def _lazy(rank: int) -> None:
    arguments: Any = ([*nn.LazyLinear(3).parameters()], torch.optim.SGD)
    with pytest.raises(ConfigurationError, match=r"OSS was given parameter 0 of group 0.*one forward"):
        OSS(*arguments, lr=0.1)
    optimizer = OSS(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"OSS was given parameter 0 of group 1.*one forward"):
        optimizer.add_param_group({"params": arguments[0]})
    model = _Partly()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"ShardedDDP was given norm.running_mean.*one forward"):
        ShardedDDP(model, optimizer)


def test_lazy_modules() -> None:
    rank_pool(2).run(_lazy)
