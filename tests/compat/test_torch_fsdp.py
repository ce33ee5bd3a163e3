"""``shardkit.torch_fsdp`` beside torch's own FSDP1 and beside one process."""

from __future__ import annotations

import copy
import inspect
import os
from functools import partial
from typing import Any
from unittest import mock

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
from torch.distributed.optim import _apply_optimizer_in_backward

import shardkit
from shardkit import torch_fsdp as ours
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.fsdp.state import plain_name
from shardkit.torch_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    state_dict,
    wrap,
)
from shardkit.torch_fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.border.strategies import batch
from tests.compat.torch_fsdp_programs import (
    CPU,
    FSDP,
    INNER,
    TORCHS,
    Net,
    adam,
    loss_of,
    net,
    one_process,
    same,
    same_state,
    train,
    trained,
)
from tests.pools import on_ranks

SAME_AS_MODULES = ("forward", "named_buffers", "named_parameters", "unscale_", "update")


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


@on_ranks(2, 3)
def test_training_is_that_of_torch_and_of_one_process(rank: int, world_size: int) -> None:
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


@on_ranks(2)
def test_casts_are_torchs(rank: int) -> None:
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


@on_ranks(2)
def test_policies_choose_the_same_units(rank: int) -> None:
    for policy in POLICIES:
        for mixed in (None, HALF):
            found = [_units(kind, auto_wrap_policy=policy, mixed_precision=mixed) for kind in (FSDP, TORCHS)]
            assert found[0] == found[1], (policy, found)
    with wrap.enable_wrap(wrapper_cls=FSDP, device_id=CPU):
        assert isinstance(wrap.wrap(nn.Linear(2, 2)), FSDP)


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


# ------------------------------------------------------------ hybrid
@on_ranks(4)
def test_hybrid_strategies(rank: int) -> None:
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
    with pytest.raises(ConfigurationError, match="Expected process_group to be passed in as either None or"):
        FSDP(net(), dist.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = trained(FSDP, rank, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)[0]
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found = model.state_dict()
        assert found["last.weight"].device_mesh == mesh
        same({"": found["last.weight"].full_tensor()}, {"": plain.last.weight.data})
        for p in model.parameters():
            p.data.zero_()
        model.load_state_dict(found)
    same(model.state_dict(), plain.state_dict())


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


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    """What a user does to parameters that FSDP ignores."""
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_ignored_frozen_and_tied(rank: int, world_size: int, use_orig_params: bool) -> None:
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
    model.module.own = model.module.own  # as apply_activation_checkpointing puts every module back
    optimizer = adam(model)
    with pytest.warns(UserWarning, match=f"on rank {rank} with no gradients"):
        model.clip_grad_norm_(0.5)
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
    narrow = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # kept apart, in fp32
    wider = FSDP(nn.Linear(4, 4), mixed_precision=narrow, use_orig_params=use_orig_params)
    with wider.no_sync():
        wider(torch.ones(1, 4)).sum().backward()
    with pytest.raises(LifecycleError, match="no_sync"), FSDP.summon_full_params(wider, with_grads=True):
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


@on_ranks(2)
def test_parameters_on_the_meta_device(rank: int) -> None:
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
    alone = nn.BatchNorm1d(3, affine=False, device="meta")  # of buffers alone
    alone.inner = nn.Linear(3, 3, device="meta")
    states = FSDP(alone, auto_wrap_policy=wrap.always_wrap_policy).state_dict()
    assert states["running_var"].eq(1).all()
    assert states["inner.weight"].any()
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


# ------------------------------------------------------------ what is refused, and what else there is
def _refused() -> None:
    model = FSDP(net(), auto_wrap_policy=INNER)
    optimizer = adam(model)
    full, of_others = StateDictType.FULL_STATE_DICT, {"state": {}, "param_groups": [{"params": ["a"]}]}
    with pytest.raises(NotImplementedError, match="writeback=False"):  # as torch's
        FSDP.summon_full_params(model, rank0_only=True).__enter__()
    refusals: list[tuple[str, Any]] = [
        ("goes with", lambda: FSDP.set_state_dict_type(model, full, ours.ShardedStateDictConfig())),
        ("reduce_dtype", lambda: model.register_comm_hook(None, print)),
        ("writeback=False", lambda: FSDP.summon_full_params(model, rank0_only=True).__enter__()),
        ("is wrapped in", lambda: FSDP(model, auto_wrap_policy=INNER)),
        ("not both", lambda: FSDP(net(), process_group=(1, 2), device_mesh=init_device_mesh("cpu", (1,)))),
        ("is a tuple of groups", lambda: FSDP(net(), process_group=(None, None))),
        ("sharding_strategy is", lambda: FSDP(net(), sharding_strategy="FULL_SHARD")),
        ("param_init_fn is 3; pass a Callable", lambda: FSDP(net(), param_init_fn=3)),
        ("auto_wrap_policy=3", lambda: FSDP(net(), auto_wrap_policy=3)),
        ("ignored_states alone", lambda: FSDP(net(), ignored_modules=[], ignored_states=[])),
        ("are modules or", lambda: FSDP(net(), ignored_states=["first"])),
        ("can't wrap a module that", lambda: TORCHS(model, device_id=CPU)),
        ("should not include FSDP modules", lambda: FSDP(nn.Sequential(model), ignored_states=[model])),
        ("is_named_optimizer", lambda: FSDP.optim_state_dict_to_load(model, optimizer, {}, is_named_optimizer=True)),
        ("by numbers", lambda: FSDP.optim_state_dict_to_load(model, optimizer, adam(net()).state_dict())),
        ("does not list", lambda: FSDP.optim_state_dict(model, adam(net()))),
        ("no FSDP module", lambda: FSDP.optim_state_dict(net(), optimizer)),
        ("no group of parameter", lambda: FSDP.optim_state_dict_to_load(model, optimizer, of_others)),
    ]  # fmt: skip
    for words, call in refusals:
        with pytest.raises(ConfigurationError, match=words):
            call()
    with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        FSDP(net(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
        with pytest.raises(ConfigurationError, match="FSDP_USE_FULL_PREC_IN_EVAL=1"):
            FSDP(net(), mixed_precision=HALF)


@on_ranks(2)
def test_refusals_and_what_else_there_is(rank: int) -> None:
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
    plain = net()
    before = adam(plain)
    unit = FSDP(net(), auto_wrap_policy=INNER, use_orig_params=True)
    assert [n for n, _ in unit.named_children()] == ["_fsdp_wrapped_module"]
    late = net()
    followed = adam(late)
    late_unit = FSDP(late, auto_wrap_policy=INNER, use_orig_params=True)
    train(late_unit, [rank], followed)  # torch's goes on with an optimizer that was made before
    train(plain, range(2), before)
    same(late_unit.state_dict(), plain.state_dict())
    own = dict(model.named_parameters())
    torch.func.functional_call(model, own, (batch(rank, 0),))
    with pytest.raises(LifecycleError, match=r"'_flat_param' .*functional_call does this"):
        torch.func.functional_call(model, {n: p.detach() * 2 for n, p in own.items()}, (batch(rank, 0),))
    assert dict(model.named_parameters()).keys() == own.keys()
    with pytest.raises(LifecycleError, match="only be called on the root FSDP instance, the outermost"):
        model.module.inner.clip_grad_norm_(1.0)


class _InName:
    """Two ranks that can't communicate, as torch's own tests have them."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3)
def test_private_names_that_torchs_tests_read(rank: int, world_size: int, use_orig_params: bool) -> None:
    model = FSDP(net(), auto_wrap_policy=INNER, use_orig_params=use_orig_params)
    loss_of(model, rank, 0).backward()
    for unit in FSDP.fsdp_modules(model):
        shard = unit._handle.flat_param
        assert unit._handle.uses_sharded_strategy
        assert shard._full_param_padded.untyped_storage().size() == 0
        assert shard.data_ptr() == shard._local_shard.data_ptr()
        with FSDP.summon_full_params(unit, recurse=False):
            inside = [p.numel() for p in shard._params]
        assert sum(inside) == sum(
            p.numel() for p in (net().inner.parameters() if unit is not model else _outer())
        )
        assert unit._state_dict_type is StateDictType.FULL_STATE_DICT
        assert unit.params[0].grad is not None
    whole = FSDP(net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert not whole._handle.uses_sharded_strategy
    alone = FSDP(net(), process_group=_InName())
    assert (alone.rank, alone.world_size) == (0, 2)


def _outer() -> list[nn.Parameter]:
    return [p for n, p in net().named_parameters() if not n.startswith("inner")]


# ------------------------------------------------------------ an optimizer for each parameter, in backward
KINDS: list[Any] = [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})]


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, 3)
def test_optimizers_of_parameters_step_in_backward(
    rank: int, world_size: int, kind: Any, strategy: ShardingStrategy | None
) -> None:
    """What torch's ``_apply_optimizer_in_backward`` makes trained nothing, and said nothing."""
    make, options = kind
    plain = net()
    optimizer = make(plain.parameters(), **options)
    train(plain, range(world_size), optimizer)
    model = FSDP(net(), auto_wrap_policy=INNER, use_orig_params=True, sharding_strategy=strategy)
    _apply_optimizer_in_backward(make, model.parameters(), options, register_hook=False)
    for step in range(3):
        if step == 1:  # micro-batches: one step, with their sum
            with model.no_sync():
                (loss_of(model, rank, step) * 0.25).backward()
            (loss_of(model, rank, step) * 0.75).backward()
        else:
            loss_of(model, rank, step).backward()
        assert all(p.grad is None for p in model.parameters())
    same(model.state_dict(), plain.state_dict())
    flat = FSDP(net())
    _apply_optimizer_in_backward(make, flat.parameters(), options, register_hook=False)
    with pytest.raises(ConfigurationError, match="only supported with use_orig_params=True"):
        loss_of(flat, rank, 0)


def _on_threads(rank: int) -> None:
    """Without torch.distributed there is no mesh to cut over."""
    model = FSDP(net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    full = model.state_dict()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    same(model.state_dict(), full, 0.0)  # every rank has all: entries are whole, as torch's
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
