"""ShardedGradScaler against the real one of fairscale, on CPU ranks.

fairscale's switches itself off without CUDA and moves its flag there; both is undone while it runs. It
is right as long as at most one rank overflows and no state dict is taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from shardkit.optim.grad_scaler import ShardedGradScaler
from tests.differential.keeping import kept
from tests.pools import rank_pool
from tests.programs.running import examples

pytest.importorskip("fairscale.optim.grad_scaler")

pytestmark = pytest.mark.oracle


@contextlib.contextmanager
def fairscale_on_cpu() -> Iterator[Any]:
    import fairscale.optim.grad_scaler as theirs

    with (
        mock.patch.object(theirs, "amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
    ):
        yield theirs.ShardedGradScaler


def steps_of(rank: int, scaler: Any, steps: list[Any], dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in (3, 5)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    seen = []
    for bad_rank, value, unscale_first, new_scale in steps:
        optimizer.zero_grad()
        first, (second,) = scaler.scale([params[0].float().sum(), (params[1].float().pow(2).sum(),)])
        (first + second).backward()
        if rank == bad_rank:
            params[1].grad[2] = value  # type: ignore[index]
        if unscale_first:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update(new_scale)
        tracker = int(scaler._growth_tracker)
        seen.append((scaler.get_scale(), tracker, [p.detach().clone() for p in params]))
    return seen


def both(
    rank: int, steps: list[Any], dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    ours = steps_of(rank, ShardedGradScaler(**options), steps, dtype)
    with fairscale_on_cpu() as theirs:
        return ours, steps_of(rank, theirs(process_group=dist.group.WORLD, **options), steps, dtype)


drawn_step = st.tuples(
    st.sampled_from([None, None, 0, 1]),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.booleans(),
    st.sampled_from([None, None, None, 16.0]),
)


@pytest.mark.parametrize("world_size", [2, 3])
@examples(50)
@given(
    steps=st.lists(drawn_step, min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    options=st.fixed_dictionaries(
        {"init_scale": st.sampled_from([1.0, 64.0, 2.0**12]), "growth_interval": st.integers(1, 3)},
        optional={"growth_factor": st.just(4.0), "backoff_factor": st.just(0.25)},
    ),
)
def test_same_scales_and_parameters(
    world_size: int, steps: list[Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    # a scale so large that all ranks overflow by themselves is what fairscale gets wrong
    growth = options.get("growth_factor", 2.0) ** (len(steps) / options["growth_interval"])
    assume(dtype != torch.float16 or options["init_scale"] * growth <= 2**12)
    check_scales(world_size, steps, dtype, options)


@kept
def check_scales(world_size: int, steps: list[Any], dtype: torch.dtype, options: dict[str, Any]) -> None:
    for ours, theirs in rank_pool(world_size, "gloo").run(both, steps, dtype, options):
        for (scale, tracker, params), (their_scale, their_tracker, their_params) in zip(
            ours, theirs, strict=True
        ):
            assert (scale, tracker) == (their_scale, their_tracker)
            torch.testing.assert_close(params, their_params)
