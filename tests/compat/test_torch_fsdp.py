"""``shardkit.torch_fsdp`` beside torch's own FSDP1 and beside one process."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.fsdp import wrap as their_wrap

from shardkit import torch_fsdp as ours
from shardkit.extra.named_state import plain_name
from shardkit.torch_fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    wrap,
)
from tests.pools import rank_pool

FSDP = ours.FullyShardedDataParallel
TORCHS = theirs.FullyShardedDataParallel
CPU = torch.device("cpu")
INNER = wrap.ModuleWrapPolicy({nn.Sequential})


class Net(nn.Module):
    """Uneven on purpose; a unit inside of the root's, and a buffer in each."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        linear = partial(nn.Linear, device=device)
        self.first = linear(5, 7)
        self.inner = nn.Sequential(linear(7, 3, bias=False), nn.Tanh(), linear(3, 6))
        self.norm = nn.BatchNorm1d(6, device=device)
        self.last = linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.inner(self.first(x))))  # type: ignore[no-any-return]


def net() -> Net:
    """In evaluation: the mean of ranks' losses is one process's over all batches."""
    made = Net().eval()
    with torch.no_grad():
        made.norm.running_mean.fill_(0.25)
        made.norm.running_var.fill_(0.5)
    return made


def batch(rank: int, step: int) -> torch.Tensor:
    """[6, 5]"""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).float().square().mean() * 5


def train(model: nn.Module, ranks: Any, optimizer: Any, steps: Any = range(3)) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, r, step) for r in ranks]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(kind: Any, rank: int, **options: Any) -> tuple[Any, torch.optim.Optimizer, list[float]]:
    model = kind(net(), auto_wrap_policy=INNER, device_id=CPU, **options)
    optimizer = adam(model)
    return model, optimizer, train(model, [rank], optimizer)


def one_process(world_size: int) -> tuple[Net, torch.optim.Optimizer]:
    plain = net()
    optimizer = adam(plain)
    train(plain, range(world_size), optimizer)
    return plain, optimizer


def same(a: dict[str, Any], b: dict[str, Any], tolerance: float = 2e-6) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=tolerance, rtol=tolerance, msg=partial("{}: {}".format, name)
        )


def same_state(plain: Net, optimizer: torch.optim.Optimizer, named: dict[str, Any]) -> None:
    """An optimizer's state by names is that of one process."""
    wanted = FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=optimizer
    )
    assert set(named["state"]) == set(wanted["state"])
    for name, values in wanted["state"].items():
        same(dict(sorted(named["state"][name].items())), dict(sorted(values.items())))
    for mine, group in zip(named["param_groups"], wanted["param_groups"], strict=True):
        assert set(mine["params"]) == set(group["params"])
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in group.items() if k != "params"
        }


# ------------------------------------------------------------ training
HALF = MixedPrecision(torch.bfloat16)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_orig_params": True},
    {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
    {"mixed_precision": HALF},
    {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
        "use_orig_params": True,
    },
    {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16), "forward_prefetch": True},
]


def _trains(rank: int, world_size: int) -> None:
    plain, plain_optimizer = one_process(world_size)
    for options in OPTIONS:
        model, optimizer, losses = trained(FSDP, rank, **options)
        theirs_too, _, their_losses = trained(TORCHS, rank, **options)
        mixed = "mixed_precision" in options
        assert losses == pytest.approx(their_losses, abs=1e-4 if mixed else 1e-6), options
        same(model.state_dict(), theirs_too.state_dict(), 1e-3 if mixed else 2e-6)
        if not mixed:
            same(model.state_dict(), plain.state_dict())
            same_state(plain, plain_optimizer, FSDP.optim_state_dict(model, optimizer))
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in theirs_too.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in theirs_too.named_buffers()]
        for mine, other in zip(FSDP.fsdp_modules(model), TORCHS.fsdp_modules(theirs_too), strict=True):
            assert (mine.rank, mine.world_size, mine.sharding_strategy) == (
                rank,
                world_size,
                other.sharding_strategy,
            )
    for options in ({"cpu_offload": CPUOffload(offload_params=True)}, {"sync_module_states": True}):
        model, _, _ = trained(FSDP, rank, **options)
        same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_is_that_of_torch_and_of_one_process(world_size: int) -> None:
    rank_pool(world_size).run(_trains, world_size)


# ------------------------------------------------------------ which modules are units
def _by_name(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features > 5


def _to_units(module: nn.Module) -> bool | dict[str, Any]:
    return {"use_orig_params": True} if isinstance(module, nn.Sequential) else isinstance(module, nn.Linear)


POLICIES: list[Any] = [
    wrap.always_wrap_policy,
    partial(wrap.size_based_auto_wrap_policy, min_num_params=30),
    partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
    partial(wrap.lambda_auto_wrap_policy, lambda_fn=_by_name),
    wrap.ModuleWrapPolicy({nn.Linear}),
    wrap.CustomPolicy(_to_units),
]


def _units(kind: Any, **options: Any) -> dict[str, bool]:
    model = net()
    made = kind(model, device_id=CPU, ignored_states=[model.first], **options)
    return {plain_name(n): m._use_orig_params for n, m in made.named_modules() if isinstance(m, kind)}


def _same_units(rank: int) -> None:
    for policy in POLICIES:
        for mixed in (None, HALF):
            found = [_units(kind, auto_wrap_policy=policy, mixed_precision=mixed) for kind in (FSDP, TORCHS)]
            assert found[0] == found[1], (policy, found)
    with wrap.enable_wrap(wrapper_cls=FSDP, device_id=CPU):
        assert isinstance(wrap.wrap(nn.Linear(2, 2)), FSDP)


def test_policies_choose_the_same_units() -> None:
    rank_pool(2).run(_same_units)


def test_names_are_torchs() -> None:
    for module, own in ((theirs, ours), (their_wrap, wrap)):
        for name in own.__all__:
            if name != "FullyShardedDataParallel":
                assert getattr(own, name) is getattr(module, name)
    assert ours.api.MixedPrecision is theirs.MixedPrecision


# ------------------------------------------------------------ state dicts
def _state_dicts(rank: int, world_size: int, use_orig_params: bool, folder: str) -> None:
    plain, _ = one_process(world_size)
    model = trained(FSDP, rank, use_orig_params=use_orig_params)[0]
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        assert FSDP.get_state_dict_type(model).state_dict_config is full
        found = model.state_dict()
        outside = nn.ModuleDict({"a": model}).state_dict()
    assert [*outside] == [f"a.{n}" for n in found]
    same(found, dict(plain.state_dict()) if rank == 0 else {})
    fresh = FSDP(Net(), auto_wrap_policy=INNER, use_orig_params=use_orig_params).eval()
    fresh.load_state_dict(plain.state_dict())
    same(fresh.state_dict(), plain.state_dict())

    # a sharded one, through files, from torch's FSDP and back
    models = {FSDP: model, TORCHS: trained(TORCHS, rank, use_orig_params=use_orig_params)[0]}
    for kind, source in models.items():
        with kind.state_dict_type(source, StateDictType.SHARDED_STATE_DICT):
            dcp.save({"model": source.state_dict()}, checkpoint_id=f"{folder}/{kind.__module__}")
    for kind, source in ((TORCHS, FSDP), (FSDP, TORCHS), (FSDP, FSDP)):
        target = kind(Net(), auto_wrap_policy=INNER, device_id=CPU, use_orig_params=use_orig_params).eval()
        with torch.no_grad():
            for p in target.parameters():
                p.zero_()
        with kind.state_dict_type(target, StateDictType.SHARDED_STATE_DICT):
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{source.__module__}")
            target.load_state_dict(state["model"])
        assert loss_of(target, 0, 9).item() == pytest.approx(loss_of(plain, 0, 9).item(), abs=1e-5)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_dicts_full_and_sharded(world_size: int, use_orig_params: bool, tmp_path: Path) -> None:
    rank_pool(world_size).run(_state_dicts, world_size, use_orig_params, str(tmp_path))


# ------------------------------------------------------------ optimizer state
def _goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Any, plain: Net) -> None:
    """Two more steps; the parameters are then one process's."""
    train(model, ranks, optimizer, range(3, 5))
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=2e-6, rtol=2e-6)


def _optimizer_states(rank: int, world_size: int, use_orig_params: bool) -> None:
    plain, plain_optimizer = one_process(world_size)
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "auto_wrap_policy": INNER,
        "device_id": CPU,
    }
    model, optimizer, _ = trained(FSDP, rank, use_orig_params=use_orig_params)
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    same_state(plain, plain_optimizer, found)
    assert FSDP.full_optim_state_dict(model, optimizer) == {} or rank == 0
    other, other_optimizer, _ = trained(TORCHS, rank)
    theirs_too = TORCHS.optim_state_dict(other, other_optimizer)
    same_state(plain, plain_optimizer, theirs_too)
    assert {k: type(v) for k, v in found["state"]["inner.0.weight"].items()} == {
        k: type(v) for k, v in theirs_too["state"]["inner.0.weight"].items()
    }
    by_number = FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain)
    of_plain = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    weights = plain.state_dict()
    after = copy.deepcopy(plain)
    after_optimizer = adam(after)
    after_optimizer.load_state_dict(copy.deepcopy(by_number))
    train(after, range(world_size), after_optimizer, range(3, 5))

    ways = [
        lambda m, o: FSDP.optim_state_dict_to_load(m, o, theirs_too),
        lambda m, o: FSDP.optim_state_dict_to_load(m, o, of_plain),
        lambda m, o: FSDP.shard_full_optim_state_dict(found, m),
        lambda m, o: FSDP.scatter_full_optim_state_dict(found if rank == 0 else None, m, optim=o),
        lambda m, o: FSDP.flatten_sharded_optim_state_dict(
            FSDP.sharded_optim_state_dict(model, optimizer), m, o
        ),
    ]
    for k, way in enumerate(ways):
        target = FSDP(net(), **options)
        target.load_state_dict(weights)
        target_optimizer = adam(target)
        if k == 0:
            config = FullOptimStateDictConfig(rank0_only=False)
            FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT, None, config)
        target_optimizer.load_state_dict(way(target, target_optimizer))
        _goes_on(target, target_optimizer, [rank], after)
    target = TORCHS(net(), **options)
    target.load_state_dict(weights)
    target_optimizer = adam(target)
    target_optimizer.load_state_dict(TORCHS.optim_state_dict_to_load(target, target_optimizer, found))
    _goes_on(target, target_optimizer, [rank], after)


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (2, True), (3, False)])
def test_optimizer_states_go_both_ways(world_size: int, use_orig_params: bool) -> None:
    rank_pool(world_size).run(_optimizer_states, world_size, use_orig_params)


def _rank_0_has_it(rank: int, world_size: int) -> None:
    """Only one rank keeps and brings the state; a part of the model is no unit, and the outermost module neither."""
    plain = nn.Sequential(net(), nn.Linear(4, 4))
    model = nn.Sequential(FSDP(copy.deepcopy(plain[0])), copy.deepcopy(plain[1]))
    plain_optimizer, optimizer = adam(plain), adam(model)
    train(plain, range(world_size), plain_optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        for p in model[1].parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config)
    found = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        same_state(plain, plain_optimizer, found)
    before = copy.deepcopy(optimizer.state_dict())
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
    after = optimizer.state_dict()
    assert [g["params"] for g in loaded["param_groups"]] == [g["params"] for g in after["param_groups"]]
    for index, values in before["state"].items():
        same(after["state"][index], values, 0.0)


def test_only_the_first_rank_has_the_state() -> None:
    rank_pool(2).run(_rank_0_has_it, 2)
