"""AdaScale beside the real one of fairscale, in the same ranks: drawn programs, state dicts both ways, faults.

fairscale's is right where every parameter is trained in every backward, nothing nests, and gradients are averaged on
all ranks (DistributedDataParallel, OSS or not).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and with it come environment variables that fixtures notice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from shardkit.optim import OSS, AdaScale
from tests.doors import linears
from tests.pools import on_ranks, rank_pool

real = pytest.importorskip("fairscale.optim.adascale")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Program = dict[str, Any]


def _model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 3)).to(dtype)


def _added(model: nn.Sequential) -> dict[str, Any]:
    return {"params": list(model[3].parameters()), "lr": 0.02}


def _groups(model: nn.Sequential, program: Program) -> list[dict[str, Any]]:
    rest = [] if "add" in program["events"] else list(model[3].parameters())
    first, second = list(model[0].parameters()), [*model[2].parameters(), *rest]
    if program["groups"] == 1:
        return [{"params": first + second}]
    return [{"params": first, "lr": 0.05}, {"params": second}]


def run(rank: int, adascale: Any, oss: Any, program: Program) -> list[Any]:
    world = torch.distributed.get_world_size()
    model = _model(program["dtype"])
    optimizer_class, options = program["optimizer"]
    groups = _groups(model, program)
    inner = oss(groups, optimizer_class, **options) if oss else optimizer_class(groups, **options)
    wrapper = DistributedDataParallel(model)
    count, scaled = program["count"], program["scaled"]
    optimizer = adascale(
        inner, num_gradients_to_accumulate=count, is_scaled_loss=scaled, debias_ewma=program["debias"],
        scale=program["scale"], smoothing=program["smoothing"],
    )  # fmt: skip
    seen: list[Any] = [(optimizer.scale, optimizer.smoothing, optimizer.gain())]
    for step, event in enumerate(program["events"]):
        if event == "scale":
            optimizer.set_scale(optimizer.scale + 1.5)
        elif event == "scale only":
            optimizer.set_scale(optimizer.scale + 1, update_estimate=False)
        elif event == "count":
            count = max(1 + (world == 1), count - 1)
            optimizer.set_num_gradients_to_accumulate(count, update_smoothing=program["smoothing"] is None)
        elif event == "add":
            optimizer.add_param_group(_added(model))
        elif event == "reload":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for k in range(count):
            torch.manual_seed(1000 * step + 10 * k + rank)
            with wrapper.no_sync() if k + 1 < count else contextlib.nullcontext():
                loss = wrapper(torch.randn(3, 4, dtype=program["dtype"])).pow(2).mean()
                (loss / count if scaled else loss).backward()
        if count > 1 and not scaled:
            optimizer.scale_grad_by_num_grads_to_accum()
        seen.append([optimizer.gain(), *(float(optimizer.gain(i)) for i in range(len(inner.param_groups)))])
        optimizer.step()
        optimizer.zero_grad()
    seen.append({k: torch.from_numpy(v.copy()) for k, v in optimizer._state.items()})
    seen.append([p.detach().clone() for p in model.parameters()])
    optimizer.unhook()
    return seen


def both(rank: int, program: Program) -> list[list[Any]]:
    import fairscale.optim

    shards = program["oss"]
    return [
        run(rank, AdaScale, OSS if shards else None, program),
        run(rank, fairscale.optim.AdaScale, fairscale.optim.OSS if shards else None, program),
    ]


def legal(world: int, program: Program) -> Program:
    """Leaves out what fairscale gets wrong."""
    if world == 1:
        program["count"] = max(program["count"], 2)
    events = program["events"]
    # an added group's averages without debiasing; a group that nothing trains until it is added
    if "add" in events and not program["debias"]:
        events = [e for e in events if e != "add"]
    if "add" in events:
        at = events.index("add")
        events = ["add", *(e for i, e in enumerate(events) if i != at and e != "add")]
    if program["oss"]:
        events = [e for e in events if e != "reload"]
    return {**program, "events": events or [None]}


programs = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "groups": st.integers(1, 2),
        "optimizer": st.sampled_from(
            [
                (SGD, {"lr": 0.1}),
                (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
                (Adam, {"lr": 0.01, "eps": 0.1}),
            ]
        ),
        "count": st.integers(1, 3),
        "scaled": st.booleans(),
        "debias": st.booleans(),
        "scale": st.sampled_from([None, 1.0, 2.5, 40.0]),
        "smoothing": st.sampled_from([None, 0.0, 0.5, 0.9]),
        "oss": st.booleans(),
        "events": st.lists(
            st.sampled_from([None, None, "scale", "scale only", "count", "add", "reload"]), min_size=1, max_size=5
        ),
    }
)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
@settings(max_examples=8, deadline=None)
@given(program=programs)
def test_drawn_programs(world: int, program: Program) -> None:
    program = legal(world, program)
    for ours, theirs in rank_pool(world).run(both, program):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ interface
# ------------------------------------------------------------------------------------------ in one process
def small(kind: Any, count: int = 2, **options: Any) -> tuple[nn.Sequential, Any]:
    model = linears(4, 5, 2, seed=1)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return model, kind(SGD(groups, lr=0.1, momentum=0.9), num_gradients_to_accumulate=count, **options)


def steps(model: Any, optimizer: Any, count: int = 1, first: int = 0) -> list[float]:
    gains = []
    for step in range(first, first + count):
        for k in range(2):
            torch.manual_seed(10 * step + k)
            (model(torch.randn(3, 4)).pow(2).mean() / 2).backward()
        gains.append(optimizer.gain())
        optimizer.step()
        optimizer.zero_grad()
    return gains


@pytest.mark.parametrize("debias", [True, False])
def test_state_dicts_both_ways(debias: bool) -> None:
    kinds = [AdaScale, real.AdaScale]
    results = []
    for writer in kinds:
        for reader in kinds:
            model, optimizer = small(writer, smoothing=0.7, debias_ewma=debias)
            steps(model, optimizer, 4)
            state = copy.deepcopy(optimizer.state_dict())
            other_model, other = small(reader, smoothing=0.7, debias_ewma=debias)
            other_model.load_state_dict(model.state_dict())
            other.load_state_dict(state)
            results.append((steps(other_model, other, 2, first=4), other_model.state_dict(), state))
    for result in results:
        assert {k: type(v) for k, v in result[2]["state"]["adascale"].items()} == {
            k: type(v) for k, v in results[0][2]["state"]["adascale"].items()
        }
        torch.testing.assert_close(result[:2], results[0][:2], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_fairscale_checkpoint_of_oss(rank: int) -> None:
    import fairscale.optim

    for kind, oss, right in ((AdaScale, OSS, True), (real.AdaScale, fairscale.optim.OSS, False)):
        model = _model(torch.float32)
        optimizer = kind(oss(model.parameters(), SGD, lr=0.1, momentum=0.9))
        wrapper = DistributedDataParallel(model)
        wrapper(torch.ones(1, 4) + rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.consolidate_state_dict(-1)
        if not right:
            with pytest.raises(TypeError):
                optimizer.state_dict()
            optimizer.unhook()
            continue
        state = optimizer.state_dict()
        plain = real.AdaScale(SGD(_model(torch.float32).parameters(), lr=0.1, momentum=0.9))
        plain.load_state_dict(state)
        assert plain.gain() == optimizer.gain()
