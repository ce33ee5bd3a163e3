"""State dicts with and without ``module.``, both ways."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import load_with_or_without_prefix, with_prefix, without_prefix


def plain(seed: int) -> nn.Module:
    """A name within it is ``module`` too."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(head=nn.Sequential(OrderedDict(module=nn.Linear(2, 3))), norm=nn.BatchNorm1d(3))
    )


def wrapped(seed: int) -> nn.Module:
    return nn.Sequential(OrderedDict(module=plain(seed)))


@pytest.mark.parametrize("source", [plain, wrapped])
@pytest.mark.parametrize("target", [plain, wrapped])
def test_loads_both_ways(source: Any, target: Any) -> None:
    state, model = source(0).state_dict(), target(1)
    result = load_with_or_without_prefix(model, state)
    assert not result.missing_keys
    for a, b in zip(model.state_dict().values(), state.values(), strict=True):
        assert torch.equal(a, b)


def test_names_and_metadata() -> None:
    inner, outer = plain(0).state_dict(), wrapped(0).state_dict()
    assert list(without_prefix(outer)) == list(inner)
    assert list(with_prefix(inner)) == list(outer)
    assert list(without_prefix(inner)) == list(inner)
    assert list(with_prefix(outer)) == list(outer)
    assert dict(without_prefix(outer)._metadata)["head.module"] == dict(inner._metadata)["head.module"]
    with pytest.raises(RuntimeError, match="Missing key"):
        load_with_or_without_prefix(nn.Linear(2, 2), inner)
