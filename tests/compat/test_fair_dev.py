"""Helpers of fairscale's tests: comparing, models, test functions on ranks."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import ConfigurationError, RedirectedError
from shardkit.fair_dev.testing import testing
from shardkit.fair_dev.testing.golden_testing_data import adascale_test_data, corr_mean_test_data
from shardkit.fair_dev.testing.testing_memory import find_tensor_by_shape
from tests.pools import on_ranks


def test_objects_are_equal() -> None:
    a: dict[str, Any] = {"x": [torch.ones(2), (1, "s")], "y": {"z": torch.zeros(1)}}
    assert testing.objects_are_equal(a, copy.deepcopy(a))
    for path, change in [
        (("x", 0), torch.ones(3)),
        (("x", 0), torch.ones(2).double()),
        (("x", 0), torch.tensor([1.0, 1.1])),
        (("x", 1), (1, "t")),
        (("x", 1), [1, "s"]),
        (("y", "z"), None),
    ]:
        b = copy.deepcopy(a)
        b[path[0]][path[1]] = change
        assert not testing.objects_are_equal(a, b)
        with pytest.raises((AssertionError, ValueError), match=str(path[1])):
            testing.objects_are_equal(a, b, raise_exception=True)
    assert testing.objects_are_equal([torch.ones(1)], [torch.ones(1) * 1.1], rtol=0.2, atol=0.0)
    assert not testing.objects_are_equal({"a": 1}, {"b": 1})
    assert not testing.objects_are_equal([1], [1, 2])


def test_seeds() -> None:
    drawn = []
    for _ in range(2):
        testing.set_random_seed(5)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_models() -> None:
    torch.manual_seed(0)
    model = testing.GPT2(embed_dim=8, num_heads=2, num_layers=2, num_positions=6, num_vocab=10, num_classes=3)
    tokens = torch.randint(10, (6, 4))
    classes, logits = model(tokens, classify=True)
    assert (classes.shape, logits.shape) == ((4, 3), (6, 4, 10))
    later = tokens.clone()
    later[3:] = (later[3:] + 1) % 10
    assert torch.equal(model(later)[:4], logits[:4]), "a token sees what comes after it"
    assert not torch.equal(model(later)[4:], logits[4:])
    layer = testing.IdentityLayer(3)
    assert layer(1, k=2) is layer.weight
    check = testing.DeviceAndTypeCheckModule(
        expected_param_dtype=torch.float16, expected_input_dtype=torch.float32
    )
    with pytest.raises(AssertionError, match=r"param\.dtype"):
        check(torch.ones(1, 5))
    assert testing.DeviceAndTypeCheckModule(expected_loss_dtype=torch.float32)(torch.ones(1, 5)).shape == ()


def test_memory() -> None:
    kept = nn.Parameter(torch.ones(7, 11, 13))
    assert find_tensor_by_shape((7, 11, 13))
    del kept
    assert not find_tensor_by_shape((7, 11, 13))
    plain = torch.ones(7, 11, 13)
    assert not find_tensor_by_shape((7, 11, 13))
    assert find_tensor_by_shape((7, 11, 13), only_param=False)
    del plain


@pytest.mark.oracle
def test_golden_data() -> None:
    theirs = pytest.importorskip("fairscale.fair_dev.testing.golden_testing_data")
    for ours, other in (
        (adascale_test_data, theirs.adascale_test_data),
        (corr_mean_test_data, theirs.corr_mean_test_data),
    ):
        for a, b in zip(ours, other, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                np.testing.assert_allclose(a[key], b[key], rtol=1e-7)


@pytest.mark.parametrize(
    "name", ["get_cycles_per_ms", "get_smi_memory", "torch_cuda_version", "SGDWithPausingCompute"]
)
def test_redirected(name: str) -> None:
    with pytest.raises(RedirectedError, match=r"Use torch\."):
        getattr(testing, name)()


@on_ranks(2)
def test_models_across_ranks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    testing.check_same_models_across_ranks(model, None, True, True)
    model.running_mean.fill_(rank)
    testing.check_same_models_across_ranks(model, None, True, False)
    testing.check_same_models_across_ranks(model, None, False, True)
    with pytest.raises(AssertionError, match="differ between ranks"):
        testing.check_same_models_across_ranks(model, None, True, True)
    assert testing.get_worker_map() == {r: f"Test{r}" for r in range(world_size)}


@testing.torch_spawn([2])
def run_on_ranks(path: str, text: str) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    Path(path, str(dist.get_rank())).write_text(f"{text}{int(total)}")


# Taken out of pytest's sight, which would look for fixtures "path" and "text".
_made = globals().pop("test_run_on_ranks")


def test_torch_spawn(tmp_path: Path) -> None:
    _made(path=str(tmp_path), text="ranks: ")
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == ["ranks: 2"] * 2


def test_torch_spawn_refuses_names_that_pytest_would_run() -> None:
    def test_something() -> None: ...

    with pytest.raises(ConfigurationError, match="must not begin with test"):
        testing.torch_spawn([2])(test_something)
