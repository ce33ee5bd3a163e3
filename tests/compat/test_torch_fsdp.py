"""``shardkit.torch_fsdp`` beside torch's own FSDP1 and beside one process."""

from __future__ import annotations

import copy
import inspect
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap as their_wrap
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

import shardkit
from shardkit import torch_fsdp as ours
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.fsdp.names import plain_name
from shardkit.torch_fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    state_dict,
    wrap,
)
from shardkit.torch_fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.pools import rank_pool

FSDP = ours.FullyShardedDataParallel
TORCHS = theirs.FullyShardedDataParallel
SAME_AS_MODULES = ("forward", "named_buffers", "named_parameters", "unscale_", "update")
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


class Seen(nn.Module):
    """Tells the dtypes of its input and its buffer."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3))
        self.inner = inner
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [x.dtype, self.offset.dtype, self.weight.dtype]
        x = x * self.weight
        return x if self.inner is None else self.inner(x.float())


def _dtypes(kind: Any, root: MixedPrecision, inner: MixedPrecision) -> list[list[torch.dtype]]:
    below = Seen()
    model = kind(Seen(kind(below, mixed_precision=inner, device_id=CPU)), mixed_precision=root, device_id=CPU)
    model(torch.ones(2, 3)).sum().backward()
    return [model.module.dtypes, below.dtypes, [p.grad.dtype for p in model.parameters()]]


def _casts(rank: int) -> None:
    precisions = [
        HALF,
        MixedPrecision(torch.bfloat16, cast_forward_inputs=True, buffer_dtype=torch.float16),
        MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False),
        MixedPrecision(torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False),
        MixedPrecision(buffer_dtype=torch.bfloat16, reduce_dtype=torch.float16),
    ]
    for root in precisions:
        for inner in precisions:
            assert _dtypes(FSDP, root, inner) == _dtypes(TORCHS, root, inner), (root, inner)


def test_casts_are_torchs() -> None:
    rank_pool(2).run(_casts)


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


def test_arguments_are_torchs() -> None:
    """All public methods have torch's arguments and defaults, so that calls by position and by name work."""
    for own, torchs in ((FSDP, TORCHS), (ShardedGradScaler, TorchsScaler)):
        for name in ["__init__", *(n for n in vars(torchs) if not n.startswith("_"))]:
            mine, wanted = getattr(own, name), getattr(torchs, name)
            if not callable(wanted) or name in SAME_AS_MODULES:
                continue
            a, b = (inspect.signature(f).parameters for f in (mine, wanted))
            assert list(a) == list(b), name
            defaults = {k: (p.default, b[k].default) for k, p in a.items() if k != "process_group"}
            assert all(x == y for x, y in defaults.values()), (name, defaults)
    for name in state_dict.__all__[1:]:
        mine, wanted = getattr(state_dict, name), getattr(dcp.state_dict, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(wanted).parameters)


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


def _by_torchs_functions(rank: int, world_size: int, use_orig_params: bool, folder: str) -> None:
    """get_state_dict and set_state_dict, through files too; ShardedTensors of torch's FSDP as they are."""
    plain, plain_optimizer = one_process(world_size)
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "auto_wrap_policy": INNER,
        "device_id": CPU,
    }
    model, optimizer, _ = trained(FSDP, rank, use_orig_params=use_orig_params)
    full = state_dict.StateDictOptions(full_state_dict=True)
    found, of_optimizer = state_dict.get_state_dict(model, optimizer, options=full)
    same(found, plain.state_dict())
    same_state(plain, plain_optimizer, of_optimizer)
    first = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_first = state_dict.get_state_dict(model, optimizer, options=first)
    assert [len(d) > 0 for d in on_first] == [rank == 0] * 2
    dcp.save(dict(zip("mo", state_dict.get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    after = copy.deepcopy(plain)
    after_optimizer = adam(after)
    after_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    train(after, range(world_size), after_optimizer, range(3, 5))

    other, other_optimizer, _ = trained(TORCHS, rank, use_orig_params=False)
    with TORCHS.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        torchs = other.state_dict(), TORCHS.optim_state_dict(other, other_optimizer)
    assert type(torchs[0]["last.weight"]).__name__ == "ShardedTensor"
    for k in range(4):
        target = FSDP(net(), **options)
        target_optimizer = adam(target)
        start = [p.detach().clone() for p in target.parameters()]
        loaded = dict(zip("mo", state_dict.get_state_dict(target, target_optimizer), strict=True))
        assert not target_optimizer.state
        assert all(torch.equal(a, b) for a, b in zip(start, target.parameters(), strict=True))
        how = None
        if k == 0:
            dcp.load(loaded, checkpoint_id=folder)
        elif k == 1:
            loaded = {"m": on_first[0], "o": on_first[1]}
            how = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        else:
            loaded = dict(zip("mo", torchs if k == 2 else (found, of_optimizer), strict=True))
        state_dict.set_state_dict(
            target, target_optimizer, model_state_dict=loaded["m"], optim_state_dict=loaded["o"], options=how
        )
        _goes_on(target, target_optimizer, [rank], after)
    fresh = net()
    assert state_dict.get_model_state_dict(fresh).keys() == fresh.state_dict().keys()
    with pytest.raises(ConfigurationError, match="ignore_frozen_params"):
        state_dict.get_model_state_dict(model, options=state_dict.StateDictOptions(ignore_frozen_params=True))


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (3, True)])
def test_torchs_functions_for_state_dicts(world_size: int, use_orig_params: bool, tmp_path: Path) -> None:
    rank_pool(world_size).run(_by_torchs_functions, world_size, use_orig_params, str(tmp_path))


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


# ------------------------------------------------------------ hybrid
def _hybrid(rank: int) -> None:
    plain, plain_optimizer = one_process(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    groups = (mesh.get_group("shards"), mesh.get_group("replicas"))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    ways: list[dict[str, Any]] = [{"process_group": groups}, {"device_mesh": mesh}, {}]
    for k, strategy in enumerate((ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)):
        for way in ways[k:]:
            model, optimizer, _ = trained(FSDP, rank, sharding_strategy=strategy, **way)
            assert (model.world_size, model.rank) == (2, rank % 2)
            same(model.state_dict(), plain.state_dict())
            same_state(plain, plain_optimizer, FSDP.optim_state_dict(model, optimizer))
    del os.environ["LOCAL_WORLD_SIZE"]
    with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE"):
        FSDP(net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = trained(FSDP, rank, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)[0]
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found = model.state_dict()
        assert found["last.weight"].device_mesh == mesh
        same({"": found["last.weight"].full_tensor()}, {"": plain.last.weight.data})
        for p in model.parameters():
            p.data.zero_()
        model.load_state_dict(found)
    same(model.state_dict(), plain.state_dict())


def test_hybrid_strategies() -> None:
    rank_pool(4).run(_hybrid)


# ------------------------------------------------------------ what is special about a module
class Tied(nn.Module):
    """A weight that is used twice, in two units; a frozen one; one that is nobody's."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(5, 7, device=device), nn.Tanh(), nn.Linear(7, 5, device=device))
        self.head = nn.Linear(5, 7, bias=False, device=device)
        self.head.weight = self.body[0].weight
        self.own = nn.Linear(7, 3, device=device)
        self.scale = nn.Parameter(torch.ones(3, device=device))
        self.register_buffer("offset", torch.zeros(3, device=device))
        self.body[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.head(self.body(x)).tanh()) * self.scale + self.offset  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.offset)


def _special(rank: int, world_size: int, use_orig_params: bool) -> None:
    plain = Tied()
    plain_optimizer = adam(plain)
    start = Tied()
    if rank:  # rank 0's count
        nn.init.zeros_(start.body[0].weight)
        start.offset.fill_(9.0)
    for p in (*start.own.parameters(), start.scale):
        p.register_hook(_mean)
    ignored = [start.own, start.scale]
    model = FSDP(
        start, ignored_states=[*start.own.parameters(), start.scale] if use_orig_params else ignored,
        auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Sequential}), sync_module_states=True,
        use_orig_params=use_orig_params, device_id=CPU,
    )  # fmt: skip
    assert all(model.module.own.weight is p for n, p in model.named_parameters() if n.endswith("own.weight"))
    optimizer = adam(model)
    for step in range(3):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        torch.stack([loss_of(plain, r, k) for r in range(world_size) for k in (step, 7)]).sum().backward()
        with model.no_sync():
            loss_of(model, rank, step).backward()
        (loss_of(model, rank, 7) * 1).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad /= world_size
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(model.clip_grad_norm_(0.5), norm)
        optimizer.step()
        plain_optimizer.step()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    with FSDP.summon_full_params(model, with_grads=True):
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        same({n: g.clone() for n, g in found.items()}, wanted)
        model.module.body[0].weight.grad.mul_(2)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        same({"": model.module.body[0].weight.grad}, {"": wanted["body.0.weight"] * 2})
    assert model.module.own.weight.grad is not None
    with model.no_sync():
        loss_of(model, rank, 7).backward()
    with pytest.raises(LifecycleError, match="no_sync"), FSDP.summon_full_params(model, with_grads=True):
        pass
    state = model.state_dict()
    same(state, plain.state_dict())
    same_state(plain, plain_optimizer, FSDP.optim_state_dict(model, optimizer))
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        names = [n for n, _ in model.named_parameters()]
        assert names == [n for n, _ in plain.named_parameters()]
        same(
            {n: p.data for n, p in model.named_parameters()}, {n: p.data for n, p in plain.named_parameters()}
        )
    with FSDP.summon_full_params(model):
        model.module.body[0].bias.data.fill_(1.0)
    assert model.state_dict()["body.0.bias"].eq(1.0).all()
    twin = copy.deepcopy(model)
    same(twin.state_dict(), model.state_dict())
    assert twin.module.own.weight is not model.module.own.weight
    assert loss_of(twin, rank, 3).item() == loss_of(model, rank, 3).item()


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    """What a user does to parameters that FSDP ignores."""
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ignored_frozen_and_tied(use_orig_params: bool) -> None:
    rank_pool(2).run(_special, 2, use_orig_params)


def _meta(rank: int) -> None:
    """Parameters on the meta device get values module by module, or those of rank 0."""

    def ones(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)

    def empty(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)

    model = FSDP(Net("meta"), auto_wrap_policy=INNER, param_init_fn=ones)
    assert all(v.eq(1).all() for k, v in model.state_dict().items() if "running" not in k and "num" not in k)
    torch.manual_seed(8)
    model = FSDP(Net("meta"), auto_wrap_policy=INNER)
    limit = 5**-0.5
    assert model.state_dict()["first.weight"].abs().max() <= limit
    assert model.state_dict()["norm.running_var"].eq(1).all()
    source = net() if rank == 0 else Net("meta")
    model = FSDP(
        source, auto_wrap_policy=INNER, param_init_fn=None if rank == 0 else empty, sync_module_states=True
    )
    same(model.state_dict(), net().state_dict(), 0.0)
    for policy in (None, wrap.ModuleWrapPolicy({nn.Sequential}), wrap.always_wrap_policy):
        tied = FSDP(Tied("meta"), auto_wrap_policy=policy, param_init_fn=ones)
        assert tied.module.head.weight is tied.module.body[0].weight
        assert all(v.eq(1).all() for k, v in tied.state_dict().items() if k != "offset")
    with pytest.raises(ConfigurationError, match="still on the meta device"):
        FSDP(Net("meta"), param_init_fn=lambda module: None)
    with pytest.raises(ConfigurationError, match="reset_parameters"):
        FSDP(nn.ParameterList([torch.empty(2, device="meta")]))


def test_parameters_on_the_meta_device() -> None:
    rank_pool(2).run(_meta)


# ------------------------------------------------------------ what is refused, and what else there is
def _refused() -> None:
    model = FSDP(net(), auto_wrap_policy=INNER)
    optimizer = adam(model)
    full, of_others = StateDictType.FULL_STATE_DICT, {"state": {}, "param_groups": [{"params": ["a"]}]}
    refusals: list[tuple[str, Any]] = [
        ("local_state_dict", lambda: FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)),
        ("goes with", lambda: FSDP.set_state_dict_type(model, full, ours.ShardedStateDictConfig())),
        ("reduce_dtype", lambda: model.register_comm_hook(None, print)),
        ("writeback=False", lambda: FSDP.summon_full_params(model, rank0_only=True).__enter__()),
        ("is wrapped in", lambda: FSDP(model, auto_wrap_policy=INNER)),
        ("not both", lambda: FSDP(net(), process_group=(1, 2), device_mesh=init_device_mesh("cpu", (1,)))),
        ("is a tuple of groups", lambda: FSDP(net(), process_group=(None, None))),
        ("sharding_strategy is", lambda: FSDP(net(), sharding_strategy="FULL_SHARD")),
        ("auto_wrap_policy is", lambda: FSDP(net(), auto_wrap_policy=3)),
        ("ignored_states alone", lambda: FSDP(net(), ignored_modules=[], ignored_states=[])),
        ("are modules or", lambda: FSDP(net(), ignored_states=["first"])),
        ("can't wrap a module that", lambda: TORCHS(model, device_id=CPU)),
        ("FSDP modules themselves", lambda: FSDP(nn.Sequential(model), ignored_states=[model])),
        ("is_named_optimizer", lambda: FSDP.optim_state_dict_to_load(model, optimizer, {}, is_named_optimizer=True)),
        ("by numbers", lambda: FSDP.optim_state_dict_to_load(model, optimizer, adam(net()).state_dict())),
        ("does not list", lambda: FSDP.optim_state_dict(model, adam(net()))),
        ("no FSDP module", lambda: FSDP.optim_state_dict(net(), optimizer)),
        ("no group of parameter", lambda: FSDP.optim_state_dict_to_load(model, optimizer, of_others)),
    ]  # fmt: skip
    for words, call in refusals:
        with pytest.raises(ConfigurationError, match=words):
            call()


def _others(rank: int) -> None:
    _refused()
    model = FSDP(net(), auto_wrap_policy=INNER)
    assert FSDP.fsdp_modules(model) == [model, model.module.inner]
    assert FSDP.fsdp_modules(nn.ModuleList([model]), root_only=True) == [model]
    assert isinstance(model.module, Net)
    assert not isinstance(model, TORCHS)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**4, process_group=dist.group.WORLD)
    optimizer = adam(model)
    scaler.scale(loss_of(model, rank, 0) * (float("inf") if rank else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert scaler.scale(torch.ones((), dtype=torch.float16)).dtype is torch.float16
    assert (model.check_is_root(), model.module.inner.check_is_root()) == (True, False)
    with pytest.raises(LifecycleError, match="outermost"):
        model.module.inner.clip_grad_norm_(1.0)


def test_refusals_and_what_else_there_is() -> None:
    rank_pool(2).run(_others)


def _on_threads(rank: int) -> None:
    """Without torch.distributed there is no mesh to cut over."""
    model = FSDP(net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(ConfigurationError, match="NO_SHARD"):
        model.state_dict()
    model = FSDP(net())
    with (
        FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
        pytest.raises(ConfigurationError, match="FULL_STATE_DICT"),
    ):
        model.state_dict()
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    plain = FSDP.optim_state_dict(model, adam(model))
    assert plain["state"] == {}


def test_on_a_backend_without_process_groups() -> None:
    shardkit.launch(_on_threads, 2, backend="simulated")
