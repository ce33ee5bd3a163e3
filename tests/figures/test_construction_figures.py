"""What it costs to make units: Python calls and exchanges, counted for four units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.errors import RankMismatchError
from tests.figures.counters import PACKAGE, CallCounter, quiet_collector
from tests.pools import on_ranks, rank_pool


def _model(large: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128) if large else nn.Linear(64, 64) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def _shard(model: nn.Sequential, how: str) -> nn.Module:
    from shardkit import FSDP, auto_wrap, enable_wrap, fully_shard

    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard as fsdp2

        for part in [*model[:3], model]:
            fsdp2(part)
    elif how == "one by one":
        for part in [*model[:3], model]:
            fully_shard(part)
    elif how == "list":
        fully_shard([*model[:3], model])
    else:
        with enable_wrap(wrapper_cls=FSDP):
            return auto_wrap(model, lambda module, recurse, unwrapped_params, module_is_root: recurse or ((
                module_is_root or isinstance(module, type(model[0]))
            ) and module is not model[3]))  # fmt: skip
    return model


def construct(rank: int, how: str, large: bool) -> tuple[int, int, int]:
    """Python calls in all, those of this library's functions, and exchanges, of the second model that is sharded."""
    _shard(_model(large), how)
    model = _model(large)
    with quiet_collector(), CallCounter() as calls:
        _shard(model, how)
    ours = [(name, n) for (path, name), n in calls.by_function.items() if path.startswith(PACKAGE)]
    exchanges = sum(n for name, n in ours if name == "all_gather_facts")
    return calls.calls, sum(n for _, n in ours), exchanges


def test_one_call_makes_one_exchange() -> None:
    pool = rank_pool(2, "gloo")
    for how, exchanges in (("one by one", 4), ("list", 1), ("auto_wrap", 1)):
        assert [found[2] for found in pool.run(construct, how, False)] == [exchanges] * 2


def test_python_calls_are_less_than_fsdp2s_and_linear_in_parameters() -> None:
    pool = rank_pool(2, "gloo")
    counted = {
        (how, large): pool.run(construct, how, large)[0]
        for how in ("fsdp2", "one by one", "list")
        for large in (False, True)
    }
    assert counted["list", False][0] <= counted["fsdp2", False][0]
    assert counted["one by one", False][0] <= 1890
    assert counted["list", False][0] <= 1560
    for how in ("one by one", "list"):
        assert counted[how, True][0] <= counted["fsdp2", True][0] / 2
        assert counted[how, True][1] - counted[how, False][1] <= 30 * 26  # parameters more


@pytest.mark.parametrize("how", ["list", "auto_wrap"])
@on_ranks(2)
def test_units_of_one_call_are_refused_together(rank: int, how: str) -> None:
    """A list of units of which the last differs on one rank: nothing is changed, and it can be tried again."""
    model = _model(False)
    before = dict(model.named_parameters())
    if rank:
        model[3] = nn.Linear(64, 9)
        before = dict(model.named_parameters())
    with pytest.raises(RankMismatchError, match=r"weight of unit 3.*\(64, 8\)|3\.weight.*8, 64"):
        _shard(model, how)
    same = {name: p is before[name] for name, p in model.named_parameters()}
    model[3] = nn.Linear(64, 8)
    out = _shard(model, how)(torch.ones(1, 64))
    assert set(same) == set(before)
    assert all(same.values())
    assert out.shape == (1, 8)
