"""Averages of weights, copies and pickles of wrapped models, and an OSS that was never stepped."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from shardkit import OSS, ShardedDDP
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.nn import FullyShardedDataParallel as FairscaleFSDP
from shardkit.oss.optimizer import NotConsolidatedError
from tests.beside import reread
from tests.border.strategies import GLOO, STRATEGIES, WORLDS, batch, make_model, twins
from tests.doors import DOORS
from tests.pools import on_ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ema", [False, True])
@on_ranks(*GLOO)
def test_averaged_models(rank: int, world_size: int, strategy: str, ema: bool) -> None:
    t = twins(rank, world_size, strategy)
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if ema else {}
    averages = [AveragedModel(m, **options) for m in (t.model, t.plain)]
    schedules = [SWALR(o, swa_lr=0.05, anneal_epochs=2) for o in (t.optimizer, t.plain_optimizer)]
    for step in range(3):
        t.zero_grad()
        t.backward(step)
        t.step()
        for average, model, schedule in zip(averages, (t.model, t.plain), schedules, strict=True):
            average.update_parameters(model)
            schedule.step()
    t.assert_equal()
    with torch.no_grad():
        mine, truth = (average.eval()(batch(0)) for average in averages)
    torch.testing.assert_close(mine, truth)
    update_bn([batch(0)], averages[0])


@on_ranks(*WORLDS)
def test_copies_of_a_sharded_ddp(rank: int, world_size: int) -> None:
    t = twins(rank, world_size, "sharded_ddp")
    assert isinstance(t.model, ShardedDDP)
    t.backward()
    t.step()
    for copied in (
        copy.deepcopy(t.model),
        pickle.loads(pickle.dumps(t.model)),
        reread(t.model, weights_only=False),
    ):
        assert list(copied.state_dict()) == list(t.model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(copied(batch(rank)), t.plain(batch(rank)))
        copied.zero_grad()
        for use in (
            lambda c=copied: c(batch(rank)),
            copied.reduce,
            copied.sync_buffers,
            copied.refresh_trainable,
        ):
            with pytest.raises(LifecycleError, match="copy of a ShardedDDP"):
                use()
        again = ShardedDDP(copied.module, OSS(copied.module.parameters(), lr=0.1))
        again(batch(rank)).sum().backward()
    t.zero_grad()
    t.backward(1)  # the original goes on
    t.step()
    t.assert_equal()


@on_ranks(*WORLDS)
def test_the_state_of_an_oss_that_was_never_stepped(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.25)
    plain = torch.optim.AdamW(model.parameters(), lr=0.25)
    state = optimizer.state_dict()
    assert state["state"] == {}
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    optimizer.load_state_dict(state)
    model(batch(rank)).sum().backward()
    optimizer.step()
    with pytest.raises(NotConsolidatedError, match="consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(-1)
    fresh = OSS(model.parameters(), torch.optim.AdamW, lr=0.25)
    fresh.load_state_dict(optimizer.state_dict())
    with pytest.raises(NotConsolidatedError, match="consolidate_state_dict"):
        fresh.state_dict()
    get_optimizer_state_dict(model, optimizer)
    heard: list[str] = []
    listener: Any = lambda record: heard.append(record.getMessage()) or True  # noqa: E731
    logging.getLogger("shardkit").addFilter(listener)
    optimizer.state_dict()
    assert heard == []
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1  # as fairscale: what was consolidated
    assert {"a step or load_state_dict() came after it" in text for text in heard} == {True}
    logging.getLogger("shardkit").removeFilter(listener)
    with pytest.raises(NotConsolidatedError, match="for all ranks"):
        get_optimizer_state_dict(model, optimizer)


# What timm does, under its name.
MODEL_EMA = """
class ModelEmaV2:
    def __init__(self, module):
        self.module = module

    def _update(self, model, update_fn):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(update_fn(ema_v, model_v))

    def update(self, model):
        self._update(model, update_fn=lambda e, m: 0.5 * e + 0.5 * m)
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_averages_that_write_to_state_dicts(rank: int, world_size: int, strategy: str) -> None:
    names: dict[str, Any] = {"__name__": "timm.utils.model_ema"}
    exec(MODEL_EMA, names)
    t = twins(rank, world_size, strategy)
    truth, beside = names["ModelEmaV2"](copy.deepcopy(t.plain)), names["ModelEmaV2"](make_model())
    mine = names["ModelEmaV2"](copy.deepcopy(t.model))
    t.backward()
    t.step()
    with torch.no_grad():
        truth.update(t.plain)
        if strategy == "sharded_ddp":
            mine.update(t.model)
            torch.testing.assert_close(mine.module(batch(rank)), truth.module(batch(rank)))
        else:
            with pytest.raises(ConfigurationError, match="AveragedModel"):
                mine.update(t.model)
        beside.update(t.model)  # of the model before it was wrapped
    torch.testing.assert_close(beside.module(batch(rank)), truth.module(batch(rank)))


@on_ranks((1, "simulated"), (2, "simulated"))
def test_copies_of_a_unit_that_shares_a_weight_of_one_further_down(rank: int) -> None:
    """The copy of the first began to work before the one that has the weight was copied."""
    for wrap in (FairscaleFSDP, *(DOORS[door] for door in DOORS if door != "dtensors")):
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        below = wrap(nn.Sequential(wrap(second)))
        model: Any = wrap(nn.Sequential(wrap(first), below))
        for copied in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            reread(model, weights_only=False),
        ):
            torch.testing.assert_close(copied.state_dict(), model.state_dict())
            copied(torch.ones(2, 3)).sum().backward()
            torch.optim.SGD(copied.parameters(), lr=0.1).step()
            assert not torch.equal(copied(torch.ones(2, 3)), model(torch.ones(2, 3)))


# ------------ Models that are not used any more are freed, with their parameters, shards and optimizer state.
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, (2, "simulated"))
def test_models_are_freed(rank: int, world_size: int, strategy: str) -> None:
    t = twins(rank, world_size, strategy, torch.optim.Adam, lr=0.1)
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.step()
    twin = copy.deepcopy(t.model)
    models = [t.model, twin]
    if strategy != "sharded_ddp":
        models += [m.module for m in models if hasattr(m, "module")]
    seen = [weakref.ref(m) for model in models for m in model.modules()]
    seen += [weakref.ref(p) for model in models for p in model.parameters()]
    seen += [weakref.ref(v) for s in t.optimizer.state.values() for v in s.values()]
    del t, twin, models
    gc.collect()
    assert not [r() for r in seen if r() is not None]
