"""What it costs to make units: Python calls and exchanges, counted for four units."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.backends.processes import RankPool
from shardkit.errors import RankMismatchError
from tests.figures.counters import PACKAGE, CallCounter, quiet_collector
from tests.pools import on_ranks, rank_pool


def _model(kind: str) -> nn.Sequential:
    """Units, and a root with a layer of its own; "wide" is one unit alone, of 32 parameters."""
    torch.manual_seed(0)
    if kind == "wide":
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])
    units = 7 if kind == "eight" else 3
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128) if kind == "large" else nn.Linear(64, 64) for _ in range(units)
    ]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def _parts(model: nn.Sequential) -> list[nn.Module]:
    return [model] if len(model) == 16 else [*model[:-1], model]


def _shard(model: nn.Sequential, parts: list[nn.Module], how: str) -> nn.Module:
    from shardkit import FSDP, auto_wrap, enable_wrap, fully_shard

    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard as fsdp2

        for part in parts:
            fsdp2(part)
    elif how == "one by one":
        for part in parts:
            fully_shard(part)
    elif how == "list":
        fully_shard(parts)
    else:
        with enable_wrap(wrapper_cls=FSDP):
            return auto_wrap(model, lambda module, recurse, unwrapped_params, module_is_root: recurse or ((
                module_is_root or isinstance(module, type(model[0]))
            ) and module is not model[3]))  # fmt: skip
    return model


def construct(rank: int, how: str, kind: str) -> tuple[int, int, int, int]:
    """Python calls in all, those of this library's functions and their files, and exchanges, of a second model."""
    model = _model(kind)
    _shard(model, _parts(model), how)
    model = _model(kind)
    parts = _parts(model)
    dist.barrier()  # a rank that waits for a second calls more
    with quiet_collector(), CallCounter() as calls:
        _shard(model, parts, how)
    ours = [(name, n) for (path, name), n in calls.by_function.items() if path.startswith(PACKAGE)]
    files = {path for path, _ in calls.by_function if path.startswith(PACKAGE)}
    exchanges = sum(n for name, n in ours if name == "all_gather_facts")
    return calls.calls, sum(n for _, n in ours), exchanges, len(files)


def test_one_call_makes_one_exchange() -> None:
    pool = rank_pool(2, "gloo")
    for how, exchanges in (("one by one", 4), ("list", 1), ("auto_wrap", 1)):
        assert [found[2] for found in pool.run(construct, how, "small")] == [exchanges] * 2


def test_python_calls_are_less_than_fsdp2s_and_linear_in_parameters() -> None:
    # processes in which no other test has run: what is cached and which backends there are changes what is called
    with RankPool(2) as pool:
        counted = {
            (how, kind): pool.run(construct, how, kind)[0]
            for how in ("fsdp2", "one by one", "list")
            for kind in ("small", "large")
        }
        eight, wide = (pool.run(construct, "list", kind)[0][0] for kind in ("eight", "wide"))
    assert counted["list", "small"][0] <= 600
    # files, those of the backend among them; hooks of others may be there
    assert counted["list", "small"][3] <= 15
    assert counted["one by one", "small"][0] <= 1120
    for how in ("one by one", "list"):
        assert counted[how, "small"][0] <= counted["fsdp2", "small"][0] / 2
        assert counted[how, "large"][0] <= counted["fsdp2", "large"][0] / 4
        assert counted[how, "large"][1] - counted[how, "small"][1] <= 10 * 26  # parameters more
    assert eight - counted["list", "small"][0] <= 4 * 130  # units more
    assert wide <= 640


@pytest.mark.parametrize("how", ["list", "auto_wrap"])
@on_ranks(2)
def test_units_of_one_call_are_refused_together(rank: int, how: str) -> None:
    """A list of units of which the last differs on one rank: nothing is changed, and it can be tried again."""
    model = _model("small")
    before = dict(model.named_parameters())
    if rank:
        model[3] = nn.Linear(64, 9)
        before = dict(model.named_parameters())
    with pytest.raises(RankMismatchError, match=r"weight of unit 3.*\(64, 8\)|3\.weight.*8, 64"):
        _shard(model, _parts(model), how)
    same = {name: p is before[name] for name, p in model.named_parameters()}
    model[3] = nn.Linear(64, 8)
    out = _shard(model, _parts(model), how)(torch.ones(1, 64))
    assert set(same) == set(before)
    assert all(same.values())
    assert out.shape == (1, 8)
