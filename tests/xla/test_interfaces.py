"""torch_xla's interfaces on gloo and on XLA replicas: arguments of FSDP, ZeRO optimizer, loader."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardkit.errors import ConfigurationError
from shardkit.fsdp.state import clean
from shardkit.xla import xla_model as xm
from shardkit.xla.fsdp import XlaFullyShardedDataParallel as FSDP
from shardkit.xla.fsdp import checkpoint_module
from shardkit.xla.fsdp.wrap import recursive_wrap, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from shardkit.xla.parallel_loader import MpDeviceLoader
from shardkit.xla.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tests.backends.environments import environments
from tests.pools import on_ranks, rank_pool
from tests.xla.models import batch

EACH = [p for p in environments("gloo", "xla") if p.values[1] == 2]


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, size), nn.Tanh())

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return x + factor * self.inner(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), Residual(7), Residual(7), nn.Linear(7, 3))


def trained_alone(
    ranks: list[int], make: Any, steps: int = 2, max_norm: float | None = None
) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([batch(r, step) for r in ranks])).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


def check(model: Any, expected: dict[str, torch.Tensor]) -> None:
    xm.mark_step()
    with model.summon_full_params():
        found = {clean(n): p.detach().cpu() for n, p in model.named_parameters()}
    assert set(found) == set(expected)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=key)


def train(model: Any, rank: int, steps: int = 2, max_norm: float | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step).to(xm.xla_device())).square().mean().backward()
        if max_norm is not None:
            model.clip_grad_norm_(max_norm)
        optimizer.step()
        xm.mark_step()


SGD = functools.partial(torch.optim.SGD, lr=0.1)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "flat": {"flatten_parameters": True, "sync_on_finalization": True},
    "rows": {"shard_param_on_dim_0": True, "reshard_after_forward": False},
    "root too": {
        "disable_reshard_on_root": False,
        "mark_step_on_finalization": True,
        "_shard_size_multiple": 1,
    },
}


def _options(rank: int, options: dict[str, Any]) -> None:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Residual})
    for wrapper in (None, lambda m, *args, **kwargs: FSDP(checkpoint_module(m), *args, **kwargs)):
        model = FSDP(build(), auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **options)
        assert [clean(n) for n, m in model.named_modules() if isinstance(m, FSDP)] == ["", "1", "2"]
        train(model, rank, max_norm=0.3)
        check(model, trained_alone([0, 1], SGD, max_norm=0.3))
    state = trained_alone([0], SGD)
    model.load_state_dict(state)  # a full one
    check(model, state)


@pytest.mark.parametrize(("backend", "world_size"), EACH)
@pytest.mark.parametrize("options", list(OPTIONS))
def test_options_train_as_one_process(backend: str, world_size: int, options: str) -> None:
    rank_pool(world_size, backend).run(_options, OPTIONS[options])


@on_ranks(*[p for p in environments("gloo", "xla") if p.values[1] == 4])
def test_sharding_groups(rank: int) -> None:
    parts = [[0, 1], [2, 3]]
    model = FSDP(
        build(), sharding_groups=parts, sharding_rank=rank % 2, sharding_world_size=2, flatten_parameters=True
    )
    assert (model.rank, model.world_size) == (rank % 2, 2)
    train(model, rank)
    check(model, trained_alone(parts[rank // 2], SGD))
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank))
    total = model.clip_grad_norm_(1e9)
    within = model.clip_grad_norm_(1e9, groups=parts)
    numel = sum(p.numel() for p in model.parameters())
    assert total.item() == pytest.approx((numel * (0 + 1 + 4 + 9)) ** 0.5, rel=1e-5)
    assert within.item() == pytest.approx((numel * (1 if rank < 2 else 13)) ** 0.5, rel=1e-5)
    with pytest.raises(ConfigurationError, match="sharding_rank"):
        FSDP(build(), sharding_groups=parts)


@on_ranks(*EACH)
def test_initialisation_and_mistakes(rank: int) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        module.load_state_dict(build().state_dict())

    with torch.device("meta"):
        model = build()
    model = FSDP(model, param_init_fn=init)
    check(model, build().state_dict())
    linear = FSDP(nn.Linear(3, 3, device="meta"))
    assert not any(p.is_meta for p in linear.parameters())
    for mistake, words in (
        (lambda: FSDP(model), "already"),
        (lambda: FSDP(nn.ModuleList([nn.Linear(2, 2)])), "no forward"),
        (lambda: FSDP(nn.Linear(2, 2), compute_dtype=torch.int64), "compute_dtype"),
        (lambda: FSDP(nn.Linear(2, 2), _debug_dummy_all_gather_op=True), "_debug_dummy_all_gather_op"),
        (lambda: FSDP(nn.Sequential(nn.Linear(2, 2, device="meta"))), "param_init_fn"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            mistake()


def test_recursive_wrap() -> None:
    class Box(nn.Module):
        def __init__(self, module: nn.Module, **options: int) -> None:
            super().__init__()
            self.module, self.options = module, options

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
    model = build()
    ignored = model[2]
    wrapped, numel = recursive_wrap(
        model, policy, Box, [ignored], list(ignored.parameters()), only_wrap_children=True, depth=3
    )
    assert wrapped is model
    assert isinstance(model[1].inner[0], Box)
    assert model[1].inner[0].options == {"depth": 3}
    assert model[2] is ignored
    assert not any(isinstance(m, Box) for m in ignored.modules())
    assert numel == 56
    seen: list[int] = []  # asked about each module once its children are wrapped
    linears = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    _, numel = recursive_wrap(
        linears, lambda unwrapped_params, recurse, **_: recurse or not seen.append(unwrapped_params),
        Box, [], [linears[0].bias],
    )  # fmt: skip
    assert (seen, numel) == ([35, 24, 0], 59)  # what doesn't count, counts nowhere
    assert size_based_auto_wrap_policy(nn.Linear(1, 1), False, 10**8)
    assert not size_based_auto_wrap_policy(nn.Linear(1, 1), False, 10**8 - 1)


@on_ranks(*EACH)
def test_loader(rank: int) -> None:
    device = xm.xla_device()
    data = TensorDataset(torch.arange(7.0), torch.arange(7))
    loader = MpDeviceLoader(DataLoader(data, batch_size=3), device)
    assert len(loader) == 3
    with contextlib.nullcontext() if device.type == "xla" else warnings.catch_warnings():
        if device.type != "xla":  # whose ranks are threads, and would leave it to others
            warnings.simplefilter("error")
        seen = [(a.device.type, a.cpu() + b.cpu()) for a, b in loader]
    assert {kind for kind, _ in seen} == {device.type}
    assert torch.cat([values for _, values in seen]).tolist() == [2.0 * i for i in range(7)]
    assert (xm.get_ordinal(), xm.xrt_world_size()) == (rank, 2)


class Undecided(torch.optim.SGD):
    """Not known to be element-wise, so that it runs whole where ranks have one program."""


@on_ranks(*EACH)
def test_zero_norm_counts_each_gradient_once(rank: int) -> None:
    """Parts of the model on other ranks count; copies of an optimizer that every rank runs whole do not."""
    device = xm.xla_device()
    model = build().to(device)
    everybody, alone = [[0, 1]], [[0], [1]]
    for sharding, norms, copies in ((everybody, alone, 1), (alone, everybody, 2), (everybody, None, 1)):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), Undecided, sharding_groups=sharding, grad_norm_groups=norms, lr=0.0
        )
        optimizer.zero_grad()
        model(batch(0, 0).to(device)).square().mean().backward()
        gradients = [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        xm.mark_step()
        one = torch.nn.utils.get_total_norm(gradients)
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm.cpu(), one * copies**0.5)
