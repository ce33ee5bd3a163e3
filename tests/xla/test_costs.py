"""What a step costs on XLA, where it does not depend on the machine: programs compiled, collectives, Python calls."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import shardkit
from shardkit.backend import get_backend
from tests.benchmarks import xla_training
from tests.benchmarks.xla_trainers import FSDP, NATIVE, SHARDED_DDP, UNSYNCED, XLA_FSDP, collectives_of_a_tpu
from tests.pools import rank_pool
from tests.xla.meeting import meet

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


TRAINERS = (NATIVE, SHARDED_DDP, UNSYNCED, FSDP, XLA_FSDP)


def test_programs_collectives_and_calls_beside_native_training() -> None:
    for result in rank_pool(2, "xla").run(xla_training.train, "mnist", TRAINERS, 0, 0):
        facts = result["facts"]
        for name in TRAINERS:
            # batch norms' statistics are rank 0's or each rank's own; training does not look at them
            assert facts[name]["losses"] == pytest.approx(facts[NATIVE]["losses"], rel=1e-5), name
        # the first step makes the momentum, the second is the steady state
        for name in (NATIVE, SHARDED_DDP, UNSYNCED, FSDP):
            assert facts[name]["compiles"] == 2, name
        collectives = {name: fact["collectives"] for name, fact in facts.items()}
        assert collectives[NATIVE] == {"all-reduce": 1}
        assert collectives[UNSYNCED] == {"reduce-scatter": 1, "all-gather": 1}
        # and buffers, of two dtypes
        assert collectives[SHARDED_DDP] == {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}
        theirs = collectives[XLA_FSDP]
        assert all(count <= theirs[kind] for kind, count in collectives[FSDP].items())
        assert facts[SHARDED_DDP]["calls"] < facts[NATIVE]["calls"]
        assert facts[FSDP]["calls"] < facts[XLA_FSDP]["calls"]
        assert facts[UNSYNCED]["operations"] <= facts[NATIVE]["operations"]


def _gathers(rank: int, theirs: bool) -> list[tuple[dict[str, int], float]]:
    """Collectives and losses of steps of six units, and a root, without flattening."""
    from shardkit.xla import fsdp as ours
    from tests.xla import pending_program

    backend, found = get_backend("xla"), []
    wrap: Any = ours.XlaFullyShardedDataParallel
    if theirs:
        from torch_xla.distributed import fsdp

        wrap = functools.partial(fsdp.XlaFullyShardedDataParallel, pin_layout_in_collective_ops=False)
    with collectives_of_a_tpu() as prepare_sync:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(6)
        ]
        units = [wrap(block.to(backend.device())) for block in blocks]
        model = wrap(nn.Sequential(*units, nn.Linear(8, 8).to(backend.device())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs = (torch.arange(32.0).view(4, 8) / 32 + rank).to(backend.device())
        for _ in range(3):
            prepare_sync()
            backend.mark_step(wait=True)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            pending = [loss, *model.parameters(), *(p.grad for p in model.parameters())]
            counted = dict(pending_program.collectives(pending))
            prepare_sync()
            backend.mark_step(wait=True)
            found.append((counted, loss.item()))
    return found


def test_a_unit_is_gathered_at_once_whatever_the_number_of_its_parameters() -> None:
    """The order of collectives makes each needed by the next: biases that backward never reads were gathered again."""
    pool = rank_pool(2, "xla")
    for ours, theirs in zip(pool.run(_gathers, False), pool.run(_gathers, True), strict=True):
        assert [loss for _, loss in ours] == [loss for _, loss in theirs]
        assert theirs[-1][0] == {"all-gather": 74, "reduce-scatter": 38}
        # 7 in forward; the root and the last unit stay until backward
        assert ours[-1][0] == {"all-gather": 7 + 5, "reduce-scatter": 38}


KINDS = ("native", "OSS", "ShardedDDP", "ShardedDDP in bfloat16", "FSDP")


def _steady_step(rank: int, kind: str) -> tuple[dict[str, int], int]:
    """A step in which nothing is new, of two backwards: what it does, and how many tensors live from step to step."""
    import torch_xla

    from shardkit.backends.xla import metrics
    from tests.xla import pending_program

    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 2))
    model: Any = nn.Sequential(*layers).to(torch_xla.device())
    averages, average = [p.detach().clone() for p in model.parameters()], get_ema_multi_avg_fn(0.9)
    lasting = len([*model.parameters(), *model.buffers(), *averages])
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer: Any
    if kind == "FSDP":
        model[0] = shardkit.FSDP(model[0])
        model = shardkit.FSDP(model)
        optimizer = torch.optim.SGD(model.parameters(), **options)
        lasting = len([*model.parameters(), *model.buffers()])
    elif kind == "native":
        optimizer = torch.optim.SGD(model.parameters(), **options)
    else:
        half = torch.bfloat16 if "bfloat16" in kind else None
        optimizer = shardkit.OSS(model.parameters(), torch.optim.SGD, broadcast_dtype=half, **options)
        lasting += 1  # the segment
        model = shardkit.ShardedDDP(model, optimizer) if kind != "OSS" else model
    unsynced = getattr(model, "no_sync", contextlib.nullcontext)
    inputs = torch.ones(4, 16, device=torch_xla.device()) * (rank + 1)
    for _ in range(4):  # the runtime sends an optimizer's numbers once
        meet()
        before, compiled = metrics.transfers(), metrics.compiles()
        meet()
        optimizer.zero_grad(set_to_none=False)  # in the form that can't be told from looking at None
        with unsynced():
            model(inputs).square().mean().backward()
        model(inputs).square().mean().backward()
        optimizer.step()
        if kind != "FSDP":
            average(averages, [p.detach() for p in model.parameters()], None)
        meet()
    inner = optimizer if kind in ("native", "FSDP") else optimizer.optim
    lasting += sum(isinstance(v, torch.Tensor) for state in inner.state.values() for v in state.values())
    aliased, moved = pending_program.aliased(), metrics.transfers() - before
    meet()
    return {"aliased": aliased, "compiles": metrics.compiles() - compiled, **moved}, lasting


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_over_what_it_replaces_and_nothing_goes_to_the_host_or_back(kind: str) -> None:
    found, lasting = rank_pool(2, "xla").run(_steady_step, kind)[0]
    assert found.pop("aliased") >= lasting
    assert found == {"compiles": 0}


def _cleared_between(rank: int, *, wrapped: bool) -> tuple[list[float], dict[str, int]]:
    """Gradients that ``no_sync`` keeps are cleared by zeros, and not, before a step."""
    import torch_xla

    from shardkit.backends.xla import metrics

    torch.manual_seed(0)
    device = torch_xla.device()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    model = shardkit.FSDP(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    unsynced = model.no_sync if wrapped else contextlib.nullcontext
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
    before, losses = metrics.transfers(), []
    for step in range(5):
        if step == 1:  # the first forward exchanges facts
            before = metrics.transfers()
            meet()
        with unsynced():
            model(inputs).square().mean().backward()
        if step % 2 == 0:
            optimizer.zero_grad(set_to_none=False)
        with unsynced():
            (2 * model(inputs)).square().mean().backward()
        losses.append(model(inputs).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 2)
        meet()
    moved = metrics.transfers() - before
    meet()
    return [x.item() for x in losses], moved


def test_gradients_of_one_rank_are_cleared_without_a_look_at_them() -> None:
    pool = rank_pool(2, "xla")
    expected = pool.run(functools.partial(_cleared_between, wrapped=False))[0][0]
    for losses, moved in pool.run(functools.partial(_cleared_between, wrapped=True)):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "from device" not in moved


def _listings(rank: int) -> int:
    """Of 4,096 ranks together and in eights: how often they are listed for two collectives of each of ten units."""
    from shardkit.backends.xla import group as groups
    from shardkit.backends.xla.runtime import Replica, replica_groups

    ranks = range(4096)
    collectives = mock.Mock(all_gather=lambda sent, *_: sent.repeat(8), all_reduce=lambda sent, *_: sent)
    host = mock.Mock()
    host.partition.side_effect = functools.partial(replica_groups, world_size=len(ranks))
    replica = Replica(0, len(ranks), collectives, host)
    device = get_backend("xla").device()
    shard, whole = torch.ones(2, device=device), torch.empty(16, device=device)
    with mock.patch.object(groups, "_ranks_of", return_value=[*range(8)]):
        for _ in range(10):
            eight = groups.as_group(get_backend("xla"), replica, mock.sentinel.process_group)
            everybody = groups.as_group(get_backend("xla"), replica, None)
            eight.all_gather_into(whole, shard)
            everybody.all_reduce(shard)
    return int(host.partition.call_count)


def test_thousands_of_ranks_are_listed_once() -> None:
    assert rank_pool(2, "xla").run(_listings) == [2, 2]


def _calls(rank: int, hooks: int) -> tuple[int, int]:
    device = get_backend("xla").device()
    weight = torch.ones(2, device=device, requires_grad=True)
    for _ in range(hooks):
        weight.register_hook(lambda _: None)
    return xla_training.counting_calls((weight * 2).sum().backward, device)


def test_calls_in_the_thread_of_backward_are_counted() -> None:
    pool = rank_pool(2, "xla")
    for (here, backward), (same, more) in zip(pool.run(_calls, 0), pool.run(_calls, 7), strict=True):
        assert here == same
        assert more - backward == 7


def _consolidated(rank: int, name: str) -> tuple[int, int, Any, Any]:
    """Bytes that ranks exchange on the host for a whole optimizer's state, that state, and one process's."""
    from shardkit.backends.xla.runtime import current_world

    device, sent = get_backend("xla").device(), [0]
    make = {"Adam": torch.optim.AdamW, "Adafactor": torch.optim.Adafactor}[name]
    params = [nn.Parameter(torch.full((300, 100 + k), float(k), device=device)) for k in range(3)]
    alone = [nn.Parameter(p.detach().cpu()) for p in params]
    plain, sharded = make(alone, lr=0.1), shardkit.OSS(params, make, lr=0.1)
    for _ in range(2):
        for p, q in zip(alone[:2], params, strict=False):  # the last one has no gradient
            p.grad = torch.ones_like(p)
            q.grad = torch.ones_like(q)
        plain.step()
        sharded.step()
    world = current_world()
    assert world is not None
    replica = world.here().replica
    assert replica is not None
    host, exchange = replica.host, replica.host.exchange

    def counting(ranks: Any, what: str, label: str, payload: bytes) -> list[bytes]:
        sent[0] += len(payload)
        return exchange(ranks, what, label, payload)

    with mock.patch.object(host, "exchange", counting):
        sharded.consolidate_state_dict(1)
        get_backend("xla").group().barrier()
    whole = sharded.state_dict()["state"] if rank == 1 else {}
    return sent[0], sum(p.numel() for p in params), whole, plain.state_dict()["state"]


@pytest.mark.parametrize("name", ["Adam", "Adafactor"])
def test_optimizer_state_does_not_pass_the_host_as_objects(name: str) -> None:
    _, (sent, numel, whole, plain) = rank_pool(2, "xla").run(_consolidated, name)
    assert sent < 1000 < numel
    assert whole.keys() == plain.keys() | ({2} if name == "Adam" else set())  # whose state is in a segment
    for index, state in plain.items():
        torch.testing.assert_close(whole[index], state)
