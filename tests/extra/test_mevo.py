"""Projection and cross entropy tile by tile: the numbers of the whole, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.errors import RedirectedError
from shardkit.experimental.nn import MEVO, BaselineSoftmaxNllLoss
from shardkit.experimental.nn.mevo import (
    BaselineSoftmax,
    GetMaxFunction,
    MemoryEfficientVocabOutput,
    get_data,
    lmcl_matmul,
)
from shardkit.model_parallel.vocab_loss import Margin, linear_cross_entropy
from shardkit.torch_seams.tensors import LiveTensors


def _data(tokens: int, width: int, words: int, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(tokens * 31 + words)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    w = torch.randn(words, width, dtype=dtype, requires_grad=True)
    return x, w, torch.randint(words, (tokens,))


def _cos_face(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, margin: Margin) -> torch.Tensor:
    """The loss as the paper writes it."""
    cosines = F.normalize(x) @ F.normalize(w).T
    return F.cross_entropy(
        margin.scale * (cosines - margin.margin * F.one_hot(target, len(w))), target, reduction="sum"
    )


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    words=st.integers(2, 11),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 12)),
    reduction=st.sampled_from(["sum", "mean"]),
    margin=st.sampled_from([None, Margin(0.35, 4.0)]),
    wanted=st.sampled_from(["both", "input", "weight"]),
)
def test_equals_linear_and_cross_entropy(
    tokens: int, words: int, tile: tuple[int, int], reduction: str, margin: Margin | None, wanted: str
) -> None:
    x, w, target = _data(tokens, 5, words)
    if margin is None:
        expected = F.cross_entropy(x @ w.T, target, reduction=reduction)
    else:
        expected = _cos_face(x, w, target, margin) / (tokens if reduction == "mean" else 1)
    gradients = torch.autograd.grad(expected * 3, [x, w])
    x2, w2 = (
        t.detach().requires_grad_(wanted in ("both", name)) for name, t in (("input", x), ("weight", w))
    )
    loss = linear_cross_entropy(
        x2, w2, target, tokens_per_tile=tile[0], words_per_tile=tile[1], reduction=reduction, margin=margin
    )
    torch.testing.assert_close(loss, expected)
    (loss * 3).backward()
    for t, g in zip((x2, w2), gradients, strict=True):
        assert (t.grad is None) == (not t.requires_grad)
        if t.grad is not None:
            torch.testing.assert_close(t.grad, g)


def test_large_logits_do_not_overflow() -> None:
    x, w, target = _data(4, 8, 9, torch.float32)
    loss = linear_cross_entropy(x * 200, w, target, words_per_tile=2)
    torch.testing.assert_close(loss, F.cross_entropy(x * 200 @ w.T, target, reduction="sum"))


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("tile_factor", [1, 3, 16])
def test_mevo_equals_its_baseline(scale: float | None, tile_factor: int) -> None:
    x, w, target = _data(6, 4, 10, torch.float32)
    weight = nn.Parameter(w.detach().clone())
    baseline = BaselineSoftmaxNllLoss(nn.Parameter(w.detach().clone()), scale=scale)
    mevo = MEVO(weight, tile_factor=tile_factor, scale=scale)
    expected = baseline(x.view(2, 3, 4), target.view(2, 3))
    expected.backward()
    gradient, x.grad = x.grad, None
    for times in (1, 2):  # gradients add up
        mevo(x.view(2, 3, 4), target.view(2, 3)).backward()
        torch.testing.assert_close(weight.grad, baseline.fc.weight.grad * times)
        torch.testing.assert_close(x.grad, gradient * times)
    torch.testing.assert_close(mevo(x, target), expected)
    assert sorted(mevo.state_dict()) == ["proj_weight", "trigger.trigger"]
    assert mevo.trigger.trigger.grad.item() == 0
    torch.testing.assert_close(mevo.eval()(x, None), x @ w.T)
    halves = MEVO(weight, reduction="mean", scale=scale)
    torch.testing.assert_close(halves(x, target) * 6, expected)


def test_hooks_of_the_weight_see_its_gradient() -> None:
    _, _, target = _data(4, 3, 7, torch.float32)
    embedding = nn.Embedding(7, 3)
    mevo = MEVO(embedding.weight, tile_factor=2)
    seen: list[torch.Tensor] = []
    embedding.weight.register_hook(lambda g: seen.append(g.clone()))
    mevo(embedding(target), target).backward()  # the weight is that of the embedding as well
    assert torch.equal(sum(seen), embedding.weight.grad)


def test_memory_is_that_of_a_tile() -> None:
    tokens, width, words = 256, 16, 4096
    x, w, target = _data(tokens, width, words, torch.float32)
    peaks = {}
    for name, loss in {
        "baseline": lambda: BaselineSoftmaxNllLoss(nn.Parameter(w.detach()))(x, target),
        "mevo": lambda: MemoryEfficientVocabOutput(nn.Parameter(w.detach()), tile_factor=16)(x, target),
    }.items():
        x.grad = None
        with LiveTensors() as live:
            loss().backward()
        peaks[name] = live.peak
    logits, weights = tokens * words * 4, words * width * 4
    assert peaks["baseline"] > 2 * logits
    assert peaks["mevo"] < 3 * weights  # the weights, their gradient, and less than that for all else


def test_autocast_computes_and_derives_the_same_numbers() -> None:
    x, w, target = _data(8, 16, 12, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, target, words_per_tile=5)
        expected = F.cross_entropy(F.linear(x, w).float(), target, reduction="sum")
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, atol=1e-2, rtol=1e-2)
    got, truth = torch.autograd.grad(loss, w), torch.autograd.grad(expected, w)
    torch.testing.assert_close(got, truth, atol=3e-2, rtol=3e-2)


def test_helpers() -> None:
    x, w, target = get_data(((5, 4), (4, 9)), dtype=torch.float32, device="cpu")
    assert (x.shape, w.shape, target.shape) == ((5, 4), (9, 4), (5,))
    whole = lmcl_matmul(x, w, target, 0, 0.3, 2.0)
    tiles = [lmcl_matmul(x, piece, target, i, 0.3, 2.0) for i, piece in enumerate(w.split(3))]
    torch.testing.assert_close(torch.cat(tiles, 1), whole)
    torch.testing.assert_close(BaselineSoftmax(w, log_softmax=False)(x, target), (x @ w.T).softmax(1))
    mevo = MemoryEfficientVocabOutput(w)
    logits = x @ w.T
    maxima = logits.max(1).values
    sums = (logits - maxima[:, None]).exp().sum(1)
    expected = F.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(mevo.get_target_nlprob(x, w, target, maxima, sums), expected)
    with pytest.raises(RedirectedError, match="linear_cross_entropy"):
        GetMaxFunction.apply(x)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, w, t: linear_cross_entropy(x, w[:, 1:], t), "don't fit"),
        (lambda x, w, t: linear_cross_entropy(x, w, t[1:]), "target each"),
        (lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none"), "reduction"),
        (lambda x, w, t: MEVO(w)(x, None), "eval"),
    ],
)
def test_wrong_calls(call: Any, says: str) -> None:
    x, w, target = get_data(((5, 4), (4, 9)), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=says):
        call(x, w, target)
    with pytest.raises(IndexError):
        linear_cross_entropy(x, w, target - 20)
