"""Gradient scaling without torch's kernels, held to the kernels (with ranks: tests/backends/test_late_programs.py)."""

from __future__ import annotations

import random

import pytest
import torch

from shardkit.training import grad_scaler as scaling


def test_scale_over_many_steps() -> None:
    drawn = random.Random(0)
    for interval in (1, 2, 3):
        scale, tracker = torch.tensor([2.0**120]), torch.tensor([0], dtype=torch.int32)
        ours, counted = scale.clone(), tracker.clone()
        for _ in range(40):
            found = [torch.tensor(float(drawn.random() < 0.2)) for _ in range(2)]
            torch._amp_update_scale_(scale, tracker, found[0] + found[1], 4.0, 0.25, interval)
            ours = scaling.updated_scale(ours, counted, found, 4.0, 0.25, interval)
            assert (ours.item(), counted.item()) == (scale.item(), tracker.item())
            assert ours.shape == scale.shape


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_gradients_are_unscaled_and_looked_at(bad: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(5), torch.randn(3, dtype=torch.float16), torch.randn(2, 2)]
    if bad is not None:
        values[1][1] = bad
    found = [torch.zeros(()), torch.zeros(())]
    results = []
    for lacks, flag in zip((False, True), found, strict=True):
        monkeypatch.setattr(scaling, "lacks_kernel", lambda *_, lacks=lacks: lacks)
        results.append([v.clone() for v in values])
        scaling.unscale(results[-1], torch.tensor(2.0**-5), flag)
    assert found[0] == found[1] == float(bad is not None)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def test_who_has_the_kernels() -> None:
    for operation in ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"):
        assert not scaling.lacks_kernel(operation, torch.device("cpu"))
    assert scaling.lacks_kernel("record_stream", torch.device("cpu"))
