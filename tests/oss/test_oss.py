"""OSS alone (gradients already averaged, as DistributedDataParallel leaves them) against plain optimizers."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import LifecycleError, OutOfStepError, RankMismatchError
from shardkit.optim.oss import OSS
from tests.beside import assert_same, batch
from tests.doors import linears
from tests.pools import on_ranks, rank_pool, run_once

mlp = functools.partial(linears, 6, 7, 4, 1)


def averaged_backward(model: nn.Module, world_size: int, step: int) -> None:
    for rank in range(world_size):
        (model(batch(rank, step)).pow(2).mean() / world_size).backward()


def step_both(
    truth: tuple[nn.Module, Any], sharded: tuple[nn.Module, Any], world_size: int, step: int
) -> None:
    for model, optimizer in (truth, sharded):
        optimizer.zero_grad()
        averaged_backward(model, world_size, step)
        optimizer.step()


# ------------------------------------------------------------------ groups, schedulers, hooks
@on_ranks(2, 3, 4)
def test_fairscale_named_parameters_and_groups(rank: int, world_size: int) -> None:
    model, truth = mlp(), mlp()

    def named(m: nn.Module) -> list[dict[str, Any]]:
        names = list(m.named_parameters())
        return [
            {"params": names[:2], "lr": 0.02},
            {"params": names[2:4], "weight_decay": 0.1},
            {"params": names[4:]},
        ]

    plain = torch.optim.AdamW(named(truth), lr=torch.tensor(0.01))
    sharded = OSS(named(model), torch.optim.AdamW, lr=torch.tensor(0.01))
    assert sharded.param_groups[0]["param_names"] == ["0.weight", "0.bias"]
    assert set(plain.defaults) <= set(sharded.defaults)
    calls: list[str] = []
    sharded.register_step_pre_hook(lambda *_: calls.append("before"))
    sharded.register_step_post_hook(lambda *_: calls.append("after"))
    sharded.register_state_dict_pre_hook(lambda *_: calls.append("state dict"))
    seen: list[int] = []
    sharded.register_state_dict_post_hook(lambda _, d: seen.append(len(d["state"])))
    for step in range(3):
        step_both((truth, plain), (model, sharded), world_size, step)
    assert calls == ["before", "after"] * 3
    assert_same(model, truth, f"rank {rank}")
    whole = sharded.state_dict(all_ranks=True)
    assert calls[-1] == "state dict"
    assert seen == [6]
    assert whole["param_groups"][0]["param_names"] == ["0.weight", "0.bias"]
    assert whole["param_groups"][1]["params"] == [2, 3]


class OfRank(torch.optim.SGD):
    """Has an argument that is each rank's own, and no option of its groups."""

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank = rank


class RankInGroups(torch.optim.SGD):
    """Has one among the options of its groups."""

    def __init__(self, params: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.defaults["rank"] = rank
        for group in self.param_groups:
            group.setdefault("rank", rank)


def _own_options(rank: int, world_size: int) -> None:
    model, truth = mlp(), mlp()
    plain = torch.optim.SGD(list(truth.parameters())[:2], lr=0.1, momentum=0.9)
    declared = functools.partial(RankInGroups, rank=rank)
    sharded = OSS(list(model.parameters())[:2], declared, lr=0.1, momentum=0.9)
    for step in range(3):
        for m, o in ((truth, plain), (model, sharded)):
            if step == 1:
                o.param_groups[0]["lr"] = 0.05
                o.add_param_group({"params": list(m.parameters())[2:]})
            if step == 2:
                o.state = collections.defaultdict(dict)  # momentum begins anew
            m.zero_grad()
            averaged_backward(m, world_size, step)
            o.step()
        if step == 1:
            state = sharded.state_dict(all_ranks=True)
            sharded.load_state_dict(state)  # as each rank has it, and then rank 0's
            for group in state["param_groups"]:
                group["rank"] = 0
            sharded.load_state_dict(state)
            assert [g["rank"] for g in sharded.optim.param_groups] == [rank, rank]
            sharded.param_groups[0]["rank"] = -rank
    assert sharded.optim.param_groups[0]["rank"] == -rank
    assert_same(model, truth, f"rank {rank}")


def _own_arguments(rank: int, world_size: int) -> None:
    model, truth = mlp(), mlp()
    sharded = OSS(model.parameters(), OfRank, lr=0.1, momentum=0.9, rank=rank)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    assert sharded.optim.rank == rank  # type: ignore[attr-defined]
    for step in range(2):
        step_both((truth, plain), (model, sharded), world_size, step)
    assert_same(model, truth, f"rank {rank}")
    state = sharded.state_dict(all_ranks=True)
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    sharded.load_state_dict(state)
    differing: list[tuple[Any, dict[str, Any]]] = [
        (functools.partial(OfRank, rank=rank), {"lr": 0.1 * (rank + 1)}),
        (functools.partial(OfRank, rank=rank), {"lr": 0.1, "momentum": 0.1 * rank}),
        (functools.partial(torch.optim.SGD, lr=0.1 * (rank + 1)), {}),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.1 * rank), {}),
        (RankInGroups, {"lr": 0.1, "rank": rank}),
    ]
    for optim, options in differing if world_size > 1 else []:
        with pytest.raises(
            RankMismatchError, match=r"option (lr|momentum|rank) of group 0 .*functools\.partial"
        ):
            OSS(model.parameters(), optim, **options)
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        OSS(model.parameters(), lr=0.1).state_dict()  # of compat: as fairscale's


@pytest.mark.parametrize("world", [(1, "gloo"), (2, "gloo")], ids=str)
def test_fairscale_arguments_of_each_rank(world: tuple[int, str]) -> None:
    rank_pool(*world).run(_own_arguments, world[0])
    rank_pool(*world).run(_own_options, world[0])


@on_ranks(1, 2, 3)
def test_a_copy_of_the_optimizer(rank: int, world_size: int) -> None:
    """Refused by name, and what to do in place of it is right."""
    models = [mlp(), mlp()]
    optimizers: list[Any] = [OSS(models[0].parameters(), torch.optim.Adam, lr=0.1), None]
    step_both((mlp(), torch.optim.SGD(mlp().parameters())), (models[0], optimizers[0]), world_size, 0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(LifecycleError, match=f"rank {rank}: an OSS is connected to its group"):
            copied(optimizers[0])
    models[1] = copy.deepcopy(models[0])
    optimizers[1] = OSS(models[1].parameters(), torch.optim.Adam, lr=0.1)
    optimizers[1].load_state_dict(optimizers[0].state_dict(all_ranks=True))
    step_both((models[0], optimizers[0]), (models[1], optimizers[1]), world_size, 1)
    assert_same(*models)


@on_ranks(2)
def test_fairscale_one_cycle_and_cyclic_schedules(rank: int, world_size: int) -> None:
    def one_cycle(o: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10)

    def cyclic(o: Any) -> Any:
        return torch.optim.lr_scheduler.CyclicLR(
            o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=False
        )

    def warmup(o: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: (epoch + 1) / 10)

    for make in (one_cycle, cyclic, warmup):
        model, truth = mlp(), mlp()
        plain = torch.optim.Adam(truth.parameters(), lr=0.01)
        sharded = OSS(model.parameters(), torch.optim.Adam, lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedules = [make(plain), make(sharded)]
            for step in range(5):
                for m, o, s in ((truth, plain, schedules[0]), (model, sharded, schedules[1])):
                    o.zero_grad()
                    averaged_backward(m, world_size, step)
                    o.step()
                    s.step()
        assert_same(model, truth, make.__name__)
        assert sharded.optim.param_groups[0]["lr"] is not None


# ------------------------------------------------------------------ checkpoints
def _save(rank: int, world_size: int, folder: str) -> dict[str, Any] | None:
    model = mlp()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        averaged_backward(model, 2, step)
        optimizer.step()
    if rank != 0:
        optimizer.consolidate_state_dict(0)
        with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
            optimizer.state_dict()
        return None
    optimizer.consolidate_state_dict(0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)
    return optimizer.state_dict()


def _resume(rank: int, folder: str) -> None:
    saved = torch.load(folder, weights_only=True)
    model, truth = mlp(), mlp()
    model.load_state_dict(saved["model"])
    truth.load_state_dict(saved["model"])
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=123.0)
    before = copy.deepcopy(saved["optimizer"])
    unchanged = copy.deepcopy(before["state"])
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group, "whoever holds it sees what was loaded"
    plain = torch.optim.Adam(truth.parameters(), lr=123.0)
    plain.load_state_dict(before)
    owned = {p for g in optimizer.optim.param_groups for p in g["params"]}
    assert set(optimizer.optim.state) == owned, "a rank keeps the state of what it owns, and nothing else"
    for step in range(2, 4):
        step_both((truth, plain), (model, optimizer), 2, step)
    torch.testing.assert_close(saved["optimizer"]["state"], unchanged, rtol=0, atol=0)  # the caller's dict
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert_same(model, truth, f"rank {rank} after resuming")
    torch.testing.assert_close(optimizer.state_dict(all_ranks=True)["state"], plain.state_dict()["state"])


@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (2, 3), (3, 1), (1, 2), (4, 2)])
def test_state_moves_between_world_sizes(wrote: int, reads: int, tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint.pt")
    rank_pool(wrote, "gloo").run(_save, wrote, path)
    rank_pool(reads, "gloo").run(_resume, path)


@on_ranks(2)
def test_states_that_do_not_fit(rank: int) -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.01)
    with pytest.raises(ValueError, match="same param groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError, match="no optimizer state"):
        optimizer.load_state_dict({"model": {}})
    with pytest.raises(ValueError, match="recipient_rank"):
        optimizer.consolidate_state_dict(7)


# ------------------------------------------------------------------ partition and what users read
@on_ranks(2)
def test_private_attributes_that_users_read(rank: int, world_size: int) -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.01)
    partition = optimizer.partition_parameters()
    assert len(partition) == world_size
    assert [p for g in partition[rank] for p in g["params"]] == optimizer.optim.param_groups[0]["params"]
    assert set(optimizer._param_to_rank) == set(model.parameters())
    assert optimizer._param_to_index[id(model[2].weight)] == 2
    assert sum(len(r) for r in optimizer._per_device_params[torch.device("cpu")]) == 6
    assert optimizer._local_params == []
    assert optimizer._all_states == []
    assert set(optimizer.buckets[torch.device("cpu")]) == {0, 1}
    assert optimizer.param_to_rank == optimizer._param_to_rank
    averaged_backward(model, world_size, 0)
    optimizer.step()
    optimizer.consolidate_state_dict(-1)
    assert len(optimizer._all_states) == world_size
    local = optimizer.local_state_dict()
    torch.testing.assert_close(optimizer._all_states[rank]["state"], local["state"])


@on_ranks(2)
def test_parameters_that_were_moved_after_construction(rank: int, world_size: int) -> None:
    model, truth = mlp(), mlp()
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)
    sharded = OSS(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:  # replaces every parameter's tensor, and with it the views of the flat buffer
            model.double().float()
        step_both((truth, plain), (model, sharded), world_size, step)
        assert_same(model, truth, f"step {step}")


def _half_broadcast(rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 4).double())
    optimizer = OSS(model.parameters(), lr=0.1, broadcast_fp16=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(model[0].weight, model[0].weight.half().float()), (
        "travels as fp16, the owner's copy too"
    )
    assert model[1].weight.dtype == torch.float64
    assert not torch.equal(model[1].weight, model[1].weight.half().double()), "fp64 travels as it is"
    return model[0].weight.detach()


def test_fairscale_broadcast_fp16_leaves_other_dtypes_alone() -> None:
    a, b = rank_pool(2, "gloo").run(_half_broadcast)
    assert torch.equal(a, b)


@on_ranks(2)
def test_balanced_partition(rank: int) -> None:
    from shardkit import OSS as CoreOSS

    params = [nn.Parameter(torch.zeros(n)) for n in (1, 1, 8, 8)]
    greedy = [CoreOSS(params, lr=0.1).owner_of(p) for p in params]
    balanced = [CoreOSS(params, lr=0.1, partition="balanced").owner_of(p) for p in params]
    assert greedy == [0, 1, 0, 1]
    assert sum(p.numel() for p, r in zip(params, balanced, strict=True) if r == 0) == 9


@on_ranks(2)
def test_defaults_of_another_optimizer(rank: int) -> None:
    params = [nn.Parameter(torch.ones(n)) for n in (2, 3)]
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        plain = kind(params, lr=0.1, weight_decay=0.2)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = OSS(params=plain.param_groups, optim=kind, **plain.defaults)
        assert optimizer.optim.defaults == plain.defaults
        schedule.optimizer = optimizer  # as Lightning 1.x puts it in the other one's place
        for rate in (0.1, 0.05):
            optimizer.step()
            assert [g["lr"] for g in optimizer.optim.param_groups] == [rate]
            schedule.step()
    for wrong in ({"no_such": 1}, {"decoupled_weight_decay": False}):
        with pytest.raises(TypeError, match="takes no argument"):
            OSS(params, torch.optim.AdamW, lr=0.1, **wrong)


def _cleared_alone(rank: int, ranks: int, how: str) -> list[str]:
    """Gradients were averaged by hand; ``how`` says who clears one of them, and when."""
    clears = {
        "nobody": lambda step, rank: False, "all ranks": lambda step, rank: step == 1,
        "one": lambda step, rank: step == 1 and rank == 1, "one, always": lambda step, rank: rank == 1,
    }  # fmt: skip
    ends = []
    for with_closure in (False, True):
        model, truth = mlp(), mlp()
        optimizer, plain = OSS(model.parameters(), torch.optim.AdamW), torch.optim.AdamW(truth.parameters())

        def evaluate(m: nn.Module, r: int, step: int, own: OSS | None = None) -> None:
            m.zero_grad()
            averaged_backward(m, ranks, step)
            if how in clears and clears[how](step, r):
                list(m.parameters())[2].grad = None
            for p in m.parameters() if own is not None and how == "owners" else ():
                p.grad = p.grad if own.owner_of(p) == rank else None

        for step in range(3):
            evaluate(model, rank, step, optimizer)
            evaluate(truth, 0, step)
            try:
                optimizer.step(
                    functools.partial(evaluate, model, rank, step, optimizer) if with_closure else None
                )
            except OutOfStepError as error:
                ends.append(str(error))
                break
            plain.step()
            torch.testing.assert_close(model.state_dict(), truth.state_dict())
    return ends


@pytest.mark.parametrize("world", [(2, "gloo"), (3, "simulated")], ids=str)
def test_gradients_that_one_rank_clears(world: tuple[int, str]) -> None:
    """Without ShardedDDP every rank has all of them, and in one process would have moved what the owner leaves."""
    for how in ("nobody", "all ranks", "owners"):
        for ends in rank_pool(*world).run(_cleared_alone, world[0], how):
            assert ends == []
    for how in ("one", "one, always") if world[1] == "simulated" else ("one",):
        for ends in run_once(*world, _cleared_alone, world[0], how):
            assert ends, how
            assert all("a step with gradients: without those of parameters 2" in end for end in ends)


@pytest.mark.parametrize("by_closure", [False, True])
@on_ranks(2, 3)
def test_unfrozen_for_backward_alone(rank: int, world_size: int, by_closure: bool) -> None:
    """Gradients that a program averages by itself move what is frozen at the step, on all ranks."""
    models = [linears(6, 7, 3) for _ in range(2)]
    for model in models:
        model[0].requires_grad_(by_closure)
    optimizers = [
        make(m.parameters(), lr=0.1) for make, m in zip((OSS, torch.optim.SGD), models, strict=True)
    ]

    def backward(model: nn.Module, step: int) -> torch.Tensor:
        model[0].requires_grad_(True)  # type: ignore[index]
        x = torch.stack([batch(r, step) for r in range(world_size)])
        loss = model(x).square().mean()
        loss.backward()
        model[0].requires_grad_(False)  # type: ignore[index]
        return loss

    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            closure = functools.partial(backward, model, step)
            optimizer.step(closure) if by_closure else (closure(), optimizer.step())
            optimizer.zero_grad()
        assert_same(*models, f"rank {rank}, step {step}")
