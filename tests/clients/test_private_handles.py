"""A worker in the manner of verl's ``strategy="fsdp"``: FSDP1's private handles move shards between phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._runtime_utils import _lazy_init

from shardkit import sharding_of
from shardkit.backend import backend_of_job
from shardkit.errors import LifecycleError
from shardkit.torch_fsdp import MixedPrecision, ShardingStrategy
from shardkit.torch_fsdp.wrap import ModuleWrapPolicy
from shardkit.torch_fsdp2 import fully_shard
from tests.compat.torch_fsdp_programs import CPU, FSDP, INNER, adam, batch, loss_of, net, same, train
from tests.pools import on_ranks


def offload(model: Any, to: torch.device | torch.dtype = CPU) -> None:
    _lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        assert not handle._offload_params
        flat_param = handle.flat_param
        assert flat_param.data.data_ptr() == flat_param._local_shard.data_ptr()
        assert id(flat_param.data) != id(flat_param._local_shard)
        assert flat_param.data.size() == flat_param._local_shard.size()
        handle.flat_param_to(to, non_blocking=True)
        flat_param._local_shard = flat_param.data


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shards_are_moved_and_cast(rank: int, world_size: int, use_orig_params: bool) -> None:
    plain, module = net().double(), net()
    module.first.bias.requires_grad_(False)
    plain.load_state_dict(module.state_dict())
    plain.first.bias.requires_grad_(False)
    device = backend_of_job().device()
    model = FSDP(module, auto_wrap_policy=INNER, device_id=device, use_orig_params=use_orig_params)
    names = [n for n, _ in model.named_parameters()]
    assert model._fsdp_wrapped_module is module
    marked = {getattr(p, "_fsdp_flattened", False) for p in model.parameters()}
    assert marked == {not use_orig_params}  # Lightning asks
    offload(model, torch.float64)  # whoever casts moves, too
    for buffer in (module.norm.running_mean, module.norm.running_var):
        buffer.data = buffer.data.double()
    optimizer, truth = adam(model), adam(plain)
    for step in range(3):
        offload(model, device)
        for one, ranks, opt in ((model, [rank], optimizer), (plain, range(world_size), truth)):
            opt.zero_grad()
            to = device if one is model else CPU
            losses = [one(batch(r, step).to(to, torch.float64)).square().mean() for r in ranks]
            (sum(losses) / len(losses)).backward()
            opt.step()
        offload(model)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    offload(model, device)
    with torch.no_grad():
        model(batch(rank, 0).to(device, torch.float64))
    model._handle.reshard(True)
    same({n: v.cpu() for n, v in model.state_dict().items()}, plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == names
    local = {n: p.data.to("cpu", copy=True) for n, p in model.named_parameters()}
    for p in model.parameters():
        p.data.zero_()
    for n, p in model.named_parameters():
        p.data.copy_(local[n])
    same({n: v.cpu() for n, v in model.state_dict().items()}, plain.state_dict())
    assert {v.dtype for v in model.state_dict().values()} == {torch.float64, torch.int64}


@on_ranks(2, 3)
def test_units_are_summoned_one_by_one(rank: int) -> None:
    """As verl collects adapters, by the names that torch has, also of a module around the outermost one."""
    around: Any = nn.ModuleDict({"actor": FSDP(net(), auto_wrap_policy=INNER, use_orig_params=True)})
    train(around["actor"], [rank], adam(around))
    assert not any("_fpw_module" in n for n, _ in [*around.named_parameters(), *around.named_modules()])
    found = {}
    for name, unit in around.named_modules():
        if isinstance(unit, FSDP):
            unit._is_root = True
            with FSDP.summon_full_params(unit, writeback=False):
                prefix = f"{name}.".replace("_fsdp_wrapped_module.", "")
                found.update({prefix + n: p.detach().clone() for n, p in unit.named_parameters()})
            unit._is_root = False
    wanted = around.state_dict()
    same(dict(sorted(found.items())), {n: wanted[n] for n in sorted(found)})
    assert len(found) == len([*net().parameters()])


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_move_of_what_is_summoned_keeps_full_values(rank: int, use_orig_params: bool) -> None:
    """verl moves the module inside, and back, to hand on its weights; units inside of it gave theirs back."""
    model = FSDP(net(), auto_wrap_policy=INNER, device_id=CPU, use_orig_params=use_orig_params)
    before, inner = model.state_dict(), model._fsdp_wrapped_module
    with pytest.raises(LifecycleError, match="summon_full_params"):
        inner.state_dict()  # which peft would look for adapters in, and find none
    with FSDP.summon_full_params(model, writeback=False):
        same({n.replace("_fsdp_wrapped_module.", ""): v for n, v in inner.state_dict().items()}, before)
        inside = model.module.to("cpu")
        found = {n: v.detach().clone() for n, v in inside.state_dict().items()}
    same({n.replace("_fsdp_wrapped_module.", ""): v for n, v in found.items()}, before)
    with FSDP.summon_full_params(model):
        model.double().float()
        for p in model.parameters():
            p.data.mul_(2)
    buffers = dict(net().named_buffers())
    same(model.state_dict(), {n: v if n in buffers else v * 2 for n, v in before.items()})
    loss_of(model, rank, 0).backward()


@on_ranks(2)
def test_weights_in_half_precision_are_trained_in_full(rank: int) -> None:
    """As accelerate casts them under mixed precision."""
    rounded, half = net(), net()
    for p, q in zip(rounded.parameters(), half.parameters(), strict=True):
        q.data = q.data.bfloat16()
        p.data = q.data.float()
    options: Any = {
        "auto_wrap_policy": INNER,
        "mixed_precision": MixedPrecision(torch.bfloat16),
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    }
    model, wanted = FSDP(half, **options), FSDP(rounded, **options)
    for unit in FSDP.fsdp_modules(model):
        assert unit._has_params
        assert unit._flat_param.requires_grad
        assert unit._flat_param._fqns
        unit._flat_param.data = unit._flat_param.data.to(torch.float32)
        unit._handle._orig_param_dtype = torch.float32
    losses = train(model, [rank], adam(model))
    assert losses == train(wanted, [rank], adam(wanted))
    same(model.state_dict(), wanted.state_dict(), 0.0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_a_copy_of_torchs_function_sets_when_parameters_are_given_back(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = net()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for gives_back in (False, True):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._auto_reshard_after_forward = False
                group = state._fsdp_param_group
                group.post_forward_mesh_info = _get_post_forward_mesh_info(gives_back, group.mesh_info)
                assert (group.post_forward_mesh_info is not None) is gives_back
        loss_of(model, rank, 0)
        kept = [unit.keep_after_forward for unit in sharding_of(model)._state.engine.units]
        assert kept == [not gives_back] * 2


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_buffers_are_replaced_by_their_names(rank: int, use_orig_params: bool) -> None:
    plain = net().eval()
    policy = ModuleWrapPolicy({nn.BatchNorm1d})
    model = FSDP(net(), auto_wrap_policy=policy, device_id=CPU, use_orig_params=use_orig_params).eval()
    x = batch(0, 0)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            others = {name: buffer + 0.5}
            mine = torch.func.functional_call(model, others, (x,))
            others = {name.replace("_fsdp_wrapped_module.", ""): buffer + 0.5}
            torch.testing.assert_close(mine, torch.func.functional_call(plain, others, (x,)))
    torch.testing.assert_close(model(x), plain(x))
