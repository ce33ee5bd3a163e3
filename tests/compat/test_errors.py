"""Errors where fairscale asserts, or raises a built-in type, are of that type too: existing code catches it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError, ShardkitError
from shardkit.internal.containers import unpack_kwargs, unpack_non_tensors
from shardkit.internal.reduce_scatter_bucketer import ReduceScatterBucketer
from shardkit.nn.misc.param_bucket import GradBucket, ParamBucket
from shardkit.optim import Adam, AdaScale, Precision
from shardkit.utils.testing import DummyProcessGroup


def _bucket() -> GradBucket:
    return GradBucket(4, torch.float32, torch.device("cpu"), 0)


def _twice() -> None:
    bucket, param = _bucket(), nn.Parameter(torch.ones(2))
    bucket.add_grad(param)
    bucket.add_grad(param)


def _parameter_twice() -> None:
    bucket, param = ParamBucket(4, torch.float32, torch.device("cpu")), nn.Parameter(torch.ones(2))
    bucket.add_param(param)
    bucket.add_param(param)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _bucket().add_grad(nn.Parameter(torch.ones(5))),
        lambda: ParamBucket(4, torch.float32, torch.device("cpu")).add_param(nn.Parameter(torch.ones(5))),
        lambda: _bucket().add_grad(nn.Parameter(torch.ones(2).double())),
        _twice,
        _parameter_twice,
        lambda: unpack_kwargs(("a", "b"), (1,)),
        lambda: unpack_non_tensors((torch.ones(1),), {"is_tensor": [True, False], "objects": []}),
        lambda: unpack_non_tensors((), set()),  # type: ignore[arg-type]
        lambda: Adam([nn.Parameter(torch.ones(2))], precision=Precision.PURE_FP16),
        lambda: AdaScale(
            torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), num_gradients_to_accumulate=0
        ),
        lambda: ReduceScatterBucketer().reduce_scatter_async([torch.ones(1)], DummyProcessGroup(0, 2)),
    ],
    ids=str,
)
def test_where_fairscale_asserts(call: Callable[[], object]) -> None:
    with pytest.raises(AssertionError) as raised:
        call()
    assert isinstance(raised.value, ShardkitError)
    assert str(raised.value)


def test_a_listener_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests that put something of their own in the place of torch.distributed."""
    mocked = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setattr(torch, "distributed", mocked)
    with pytest.raises(ConfigurationError, match=r"^the first$"):
        raise ConfigurationError("the first")


def test_kinds() -> None:
    assert issubclass(ConfigurationError, (ValueError, RuntimeError))
    assert issubclass(LifecycleError, RuntimeError)
    with pytest.raises(ValueError, match="betas"):
        Adam([nn.Parameter(torch.ones(2))], betas=(1.0, 0.0))
