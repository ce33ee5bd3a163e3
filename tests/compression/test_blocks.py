"""Blocks of codes: how far what comes out is from what went in, for drawn numbers, dtypes and block sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.policy import Compression
from shardkit.reduction.compression import BlockFormat, Feedback

CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ROUNDED = 1.0001  # fp32 rounds in between


def _coded(values: torch.Tensor, blocks: BlockFormat, out: torch.dtype = torch.float32) -> torch.Tensor:
    made = blocks.empty(blocks.blocks_of(values.numel()), values)
    blocks.encode(values, made)
    result = values.new_empty((1, values.numel()), dtype=out)
    blocks.decode(made.view(1, -1, blocks.nbytes), result)
    return result[0]


def _bound(values: torch.Tensor, blocks: BlockFormat) -> torch.Tensor:
    """As the module's docstring says, for each number."""
    padded = torch.zeros(blocks.blocks_of(values.numel()) * blocks.numel, dtype=torch.float64)
    padded[: values.numel()] = values
    parts = padded.view(-1, blocks.numel)
    scale = (parts.abs().amax(1, True) / LARGEST[blocks.dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    if blocks.dtype is torch.int8:
        bound = (scale / 2).expand_as(parts)
    elif blocks.dtype is torch.float8_e4m3fn:
        bound = torch.maximum(parts.abs() / 17, scale / 1024)
    else:
        bound = torch.maximum(parts.abs() / 9, scale / 131072)
    return bound.reshape(-1)[: values.numel()] * ROUNDED


def _floats() -> st.SearchStrategy[float]:
    """Of all magnitudes, or of one: blocks are made for the latter."""
    alike = st.floats(-1, 1, width=32)
    return st.floats(-(2.0**126), 2.0**126, width=32) | alike | st.just(0.0)


@given(st.lists(_floats(), min_size=1, max_size=70), st.sampled_from(CODES), st.sampled_from([16, 32, 256]))
def test_the_error_is_bounded(numbers: list[float], dtype: torch.dtype, block: int) -> None:
    values, blocks = torch.tensor(numbers), BlockFormat(dtype, block)
    off = (_coded(values, blocks).double() - values.double()).abs()
    assert (off <= _bound(values, blocks)).all()


@pytest.mark.parametrize("dtype", CODES)
def test_many_numbers(dtype: torch.dtype) -> None:
    """More than what is encoded at once, with a last block that is not full; and what is worse than the bound."""
    values, blocks = (
        torch.randn(2**20 + 2**18 + 7, generator=torch.Generator().manual_seed(0)),
        BlockFormat(dtype, 256),
    )
    off = (_coded(values, blocks) - values).double().abs()
    bound = _bound(values, blocks)
    assert (off <= bound).all()
    assert (off > 0.9 * bound).any()  # it says no more than it has to


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype, own: torch.dtype) -> None:
    """Codes are exact in halves: what comes out is rounded once."""
    values, blocks = (
        torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(own),
        BlockFormat(dtype, 64),
    )
    exact = _coded(values.float(), blocks)
    assert torch.equal(_coded(values, blocks, own), exact.to(own))


@pytest.mark.parametrize("dtype", CODES)
def test_zeros_and_tiny_numbers(dtype: torch.dtype) -> None:
    blocks = BlockFormat(dtype, 16)
    assert torch.equal(_coded(torch.zeros(9), blocks), torch.zeros(9))
    tiny = torch.tensor([1e-45, -1e-40, 0.0, 1e-38])  # below the smallest normal number
    assert (_coded(tiny, blocks) - tiny).abs().max() <= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_never_hidden(dtype: torch.dtype, bad: float) -> None:
    """Its whole block is not finite, other blocks are as they were; and feedback keeps none of it."""
    values, blocks = torch.ones(48), BlockFormat(dtype, 16)
    values[21] = bad
    assert _coded(values, blocks).isfinite().tolist() == [True] * 16 + [False] * 16 + [True] * 16
    feedback, made = Feedback(blocks, True), blocks.empty(3, values)
    feedback.encode(values, made)
    assert feedback.error is not None
    assert feedback.error.isfinite().all()
    total = torch.empty(48)
    blocks.sum(torch.stack([made, made]), total)
    assert not total[16:32].isfinite().any()
    assert torch.equal(total[:16], torch.full((16,), 2.0))


@pytest.mark.parametrize("dtype", CODES)
def test_a_sum_is_that_of_the_parts_in_their_order(dtype: torch.dtype) -> None:
    blocks, generator = BlockFormat(dtype, 64), torch.Generator().manual_seed(2)
    parts = [torch.randn(1280, generator=generator) for _ in range(3)]
    made = blocks.empty(60, parts[0]).view(3, 20, -1)
    for part, place in zip(parts, made, strict=True):
        blocks.encode(part, place)
    total = torch.empty(1280)
    blocks.sum(made, total)
    first, second, third = (_coded(part, blocks) for part in parts)
    assert torch.equal(total, first + second + third)


@given(st.integers(0, 2**16), st.sampled_from(CODES), st.integers(2, 12))
def test_nothing_is_lost_over_steps(seed: int, dtype: torch.dtype, steps: int) -> None:
    """Whatever the number of steps, the sums differ by one step's error, not by that of all."""
    blocks, generator = BlockFormat(dtype, 16), torch.Generator().manual_seed(seed)
    feedback = Feedback(blocks, True)
    sent, came = torch.zeros(32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    largest = torch.zeros(32, dtype=torch.float64)
    constant = torch.randn(32, generator=generator)
    for _ in range(steps):
        made, values, result = blocks.empty(2, constant), constant.clone(), torch.empty(1, 32)
        before = torch.zeros(32) if feedback.error is None else feedback.error.float()
        largest = torch.maximum(largest, _bound(values + before, blocks))
        feedback.encode(values, made)
        blocks.decode(made.view(1, 2, -1), result)
        sent += constant
        came += result[0]
    kept_in_bf16 = steps * largest / 256
    assert ((sent - came).abs() <= largest + kept_in_bf16).all()


def test_what_is_not_there_gets_nothing_and_loses_nothing() -> None:
    """Zeros of a parameter without a gradient, between others that have one."""
    blocks = BlockFormat(torch.int8, 16)
    feedback, made, result = Feedback(blocks, True), blocks.empty(2, torch.empty(0)), torch.empty(1, 32)
    feedback.encode(torch.linspace(0.1, 1.0, 32), made, complete=True)
    assert feedback.error is not None
    before = feedback.error.clone()
    assert before[1] != 0
    values = torch.zeros(32)
    values[0] = 1.0
    feedback.encode(values, made, complete=False)
    blocks.decode(made.view(1, 2, -1), result)
    assert torch.equal(result[0, 1:], torch.zeros(31))
    assert torch.equal(feedback.error[1:], before[1:])


def test_bytes_of_the_default() -> None:
    default = Compression()
    blocks = BlockFormat(default.dtype, default.block)
    assert blocks.nbytes == 272
    assert blocks.nbytes / (4 * blocks.numel) < 0.27
