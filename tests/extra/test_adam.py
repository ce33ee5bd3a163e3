"""fairscale.optim.Adam against its formula in fp64, in every precision; torch's Adam where both are the same."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.optim import OSS, Adam, Precision
from tests.pools import on_ranks

HALF = [Precision.MIXED_PRECISION, Precision.MEMORY_EFFICIENT_MIXED_PRECISION, Precision.PURE_FP16]
SHAPES = [(3, 2), (5,), ()]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=made).to(dtype)) for s in SHAPES]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """The second parameter has none at step 1: it is behind from then on."""
    made = torch.Generator().manual_seed(100 + step)
    some: list[torch.Tensor | None] = [torch.randn(s, generator=made).to(dtype) for s in SHAPES]
    if step == 1:
        some[1] = None
    return some


def truth(
    dtype: torch.dtype,
    steps: int,
    lr: float,
    betas: Any,
    eps: float,
    decay: float,
    corrected: bool,
    inside: bool,
):
    values = [p.detach().double() for p in parameters(dtype)]
    state: list[dict[str, Any]] = [
        {"t": 0, "m": torch.zeros_like(v), "v": torch.zeros_like(v)} for v in values
    ]
    for step in range(steps):
        for x, g, s in zip(values, gradients(step, dtype), state, strict=True):
            if g is None:
                continue
            s["t"] += 1
            s["m"] = betas[0] * s["m"] + (1 - betas[0]) * g.double()
            s["v"] = betas[1] * s["v"] + (1 - betas[1]) * g.double() ** 2
            c = math.sqrt(1 - betas[1] ** s["t"]) / (1 - betas[0] ** s["t"]) if corrected else 1.0
            root = (s["v"] + eps).sqrt() if inside else s["v"].sqrt() + eps
            x -= lr * c * (s["m"] / root + decay * x)
    return values


def run(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, g in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision(corrected: bool, inside: bool, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = Adam(params, 0.1, corrected, (0.8, 0.9), 1e-3, inside, 0.05)
    assert optimizer.precision is Precision.FULL_PRECISION
    run(optimizer, params, range(5))
    expected = truth(dtype, 5, 0.1, (0.8, 0.9), 1e-3, 0.05, corrected, inside)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close([p.detach().double() for p in params], expected, **tolerance)


def test_without_decay_it_is_torchs() -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    run(Adam(params, lr=0.1, eps=1e-12), params, range(5))
    run(torch.optim.Adam(others, lr=0.1, eps=1e-12), others, range(5))
    torch.testing.assert_close(params, others)


@pytest.mark.parametrize("precision", HALF)
def test_half_precision(precision: Precision) -> None:
    params = parameters(torch.float16)
    optimizer = Adam(params, lr=0.05, eps=1e-3, precision=precision)
    run(optimizer, params, range(6))
    expected = truth(torch.float16, 6, 0.05, (0.9, 0.999), 1e-3, 0.0, True, False)
    torch.testing.assert_close([p.detach().double() for p in params], expected, rtol=5e-3, atol=5e-3)
    state_dtype = torch.float16 if precision is Precision.PURE_FP16 else torch.float32
    assert {s[k].dtype for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")} == {state_dtype}
    if precision is Precision.MIXED_PRECISION:
        copies = [p for g in optimizer.fp32_param_groups for p in g["params"]]
        torch.testing.assert_close([c.detach().double() for c in copies], expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(c.half(), p) for c, p in zip(copies, params, strict=True))
    else:
        assert optimizer.fp32_param_groups == []


def test_small_updates_are_kept_in_the_fp32_copies() -> None:
    lasting, lost = (nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))
    both = [Adam([lasting], 1e-5), Adam([lost], 1e-5, precision=Precision.MEMORY_EFFICIENT_MIXED_PRECISION)]
    for _ in range(200):
        for p, optimizer in zip((lasting, lost), both, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert lasting.max() < 1 - 1e-3
    assert torch.equal(lost, torch.ones_like(lost))


def test_small_second_moments_survive_in_fp16() -> None:
    """1e-4 squared is below what fp16 holds; its state is scaled."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = Adam([p], lr=0.1, eps=1e-12, precision=Precision.PURE_FP16)
    for _ in range(3):
        p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.3), rtol=0.02, atol=0)


def test_overflowing_state_lowers_its_scale() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = Adam([p], lr=1e-3, precision=Precision.PURE_FP16)
    p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    assert optimizer.state_dict()["optim_scale"] == 2.0**15
    assert not optimizer.state[p]["exp_avg_sq"].any()
    optimizer._optim_scale = 1.0
    p.grad = torch.full_like(p, 60000.0)
    with pytest.raises(LifecycleError, match="exploding"):
        optimizer.step()


def test_the_scale_grows_after_steps_without_overflow() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = Adam([p], lr=1e-3, precision=Precision.PURE_FP16)
    optimizer._optim_scale, optimizer._optim_scale_update_freq = 2.0**15, 2  # as fairscale's users set them
    scales = []
    for _ in range(6):
        p.grad = torch.full_like(p, 0.01)
        optimizer.step()
        scales.append(optimizer._optim_scale)
    assert scales == [2.0**15, *[2.0**16] * 5]  # and not beyond


def test_fp32_copies_made_anew() -> None:
    (p, *_) = parameters(torch.float16)
    optimizer = Adam([p], lr=0.1, precision=Precision.MIXED_PRECISION)
    with torch.no_grad():
        p.fill_(2.0)
    optimizer._build_fp32_params([p])
    assert optimizer.fp32_param_groups[0]["params"][0].eq(2.0).all()
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.float(), torch.full_like(p, 1.9).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", [Precision.FULL_PRECISION, *HALF])
def test_continues_from_a_state_dict(precision: Precision) -> None:
    dtype = torch.float32 if precision is Precision.FULL_PRECISION else torch.float16
    params = parameters(dtype)
    optimizer = Adam(params, lr=0.05, precision=precision)
    optimizer._optim_scale /= 4.0 if precision is Precision.PURE_FP16 else 1.0
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    others = copy.deepcopy(params)
    resumed = Adam(others, lr=0.05, precision=precision)
    resumed.load_state_dict(saved)
    for p, q in zip(params, others, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], resumed.state[q][key])
            assert optimizer.state[p][key].dtype is resumed.state[q][key].dtype
    run(optimizer, params, range(3, 5))
    run(resumed, others, range(3, 5))
    # fp32 copies begin at the rounded parameters
    tolerance = 2e-3 if precision is Precision.MIXED_PRECISION else 0.0
    torch.testing.assert_close(params, others, rtol=tolerance, atol=tolerance)


def test_groups_and_closure() -> None:
    params = parameters(torch.float16)
    optimizer = Adam([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.1)
    before = copy.deepcopy(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.float().pow(2).sum() for p in params]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])
    assert (optimizer.mixed_precision, optimizer.supports_memory_efficient_fp16) == (True, True)
    assert optimizer._step_supports_amp_scaling is False


@pytest.mark.parametrize("precision", [Precision.FULL_PRECISION, *HALF])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles(precision: Precision, how: Any) -> None:
    dtype = torch.float32 if precision is Precision.FULL_PRECISION else torch.float16
    params = parameters(dtype)
    optimizer = Adam(params, lr=0.05, precision=precision, eps_inside_sqrt=True)
    run(optimizer, params, range(2))
    others, other = how((params, optimizer))
    run(optimizer, params, range(2, 4))
    run(other, others, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@on_ranks(2)
def test_within_oss(rank: int, dtype: torch.dtype) -> None:
    params, alone = parameters(dtype), parameters(dtype)
    sharded, plain = OSS(params, optim=Adam, lr=0.1), Adam(alone, lr=0.1)
    run(sharded, params, range(4))
    run(plain, alone, range(4))
    torch.testing.assert_close(params, alone, rtol=1e-3, atol=1e-3)
    saved = sharded.state_dict(all_ranks=True)
    plain = Adam(alone, lr=0.1)
    plain.load_state_dict(copy.deepcopy(saved))
    sharded = OSS(params, optim=Adam, lr=0.1)
    sharded.load_state_dict(saved)
    run(sharded, params, range(4, 6))
    run(plain, alone, range(4, 6))
    torch.testing.assert_close(params, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float32, {"amsgrad": True}, "amsgrad"),
        (torch.float32, {"precision": Precision.MIXED_PRECISION}, "float32"),
        (torch.float16, {"precision": Precision.FULL_PRECISION}, "float16"),
        (torch.bfloat16, {"precision": Precision.PURE_FP16}, "bfloat16"),
        (torch.float32, {"betas": (1.0, 0.0)}, "betas"),
        (torch.float32, {"betas": (0.9, -0.1)}, "betas"),
        (torch.float32, {"weight_decay": -1.0}, "weight_decay"),
        (torch.float32, {"lr": -1.0}, "lr"),
        (torch.float32, {"eps": float("nan")}, "eps"),
    ],
)
def test_wrong_options(dtype: torch.dtype, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Adam(parameters(dtype), **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = Adam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="SparseAdam"):
        optimizer.step()
