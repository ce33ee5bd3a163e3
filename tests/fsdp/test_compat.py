"""fairscale's FullyShardedDataParallel: its names, what existing code reads from it, and functions beside it."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.nn import FullyShardedDataParallel
from shardkit.nn.data_parallel import (
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from shardkit.nn.misc import FlattenParamsWrapper
from shardkit.utils.testing import DummyProcessGroup
from tests.beside import batch as data
from tests.beside import steps_beside
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import on_ranks

ARGUMENTS = {
    "module": inspect.Parameter.empty,
    "process_group": None,
    "process_group_reduce_scatter": "reduce_scatter",
    "reshard_after_forward": True,
    "disable_reshard_on_root": True,
    "mixed_precision": False,
    "fp32_reduce_scatter": False,
    "flatten_parameters": True,
    "move_params_to_cpu": False,
    "compute_dtype": None,
    "buffer_dtype": None,
    "move_grads_to_cpu": None,
    "bucket_cap_mb": 25,
    "compute_device": None,
    "no_broadcast_optim_state": False,
    "state_dict_device": None,
    "clear_autocast_cache": False,
    "force_input_to_fp32": False,
    "verbose": False,
    "cpu_offload": False,
    "state_dict_on_rank_0_only": False,
    "gradient_predivide_factor": None,
    "allow_reset_parameters": False,
}


def test_arguments_in_order_with_defaults() -> None:
    signature = inspect.signature(FullyShardedDataParallel)
    assert {n: p.default for n, p in signature.parameters.items()} == ARGUMENTS
    assert list(signature.parameters) == list(ARGUMENTS)


def model_of(**options: Any) -> FullyShardedDataParallel:
    """Two units, one inside the other."""
    model = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh())))
    model[1] = FullyShardedDataParallel(model[1], **options)
    return FullyShardedDataParallel(model, **options)


@on_ranks(1, 2, 3)
def test_names_and_attributes(rank: int, world_size: int) -> None:
    model = model_of(verbose=True)
    raw = "_fsdp_wrapped_module"
    assert [n for n, _ in model.named_parameters()] == [
        f"{raw}.flat_param_0",
        f"{raw}._fpw_module.1.{raw}.flat_param_0",
    ]
    with model.summon_full_params():
        assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        with pytest.raises(LifecycleError, match="current state"):
            model.assert_state(TrainingState.IDLE)
    model.assert_state([TrainingState.IDLE, TrainingState.FORWARD])
    assert isinstance(model.module, FlattenParamsWrapper)
    assert model.module._fpw_module[0].in_features == model[0].in_features == WIDTH
    assert model.module.metadata(0)[0] == ["0.weight", "0.bias"]
    assert model.module.num_params_managed == 2
    numel = WIDTH * 5 + 5
    shard = -(-numel // world_size)
    (param,) = model.params
    assert param.shape == (shard,)
    assert (param._is_sharded, param._orig_size) == (world_size > 1, (numel,))
    assert model.numel_padded_per_param == [max(0, min(shard, shard * (rank + 1) - numel))]
    assert (model.rank, model.world_size, model.compute_dtype) == (rank, world_size, torch.float32)
    assert model._require_backward_grad_sync
    assert "world_size=" in repr(model)
    assert "bucket_cap_mb=25" in repr(model)
    assert get_fsdp_instances(model) == [model, model[1]]
    x = batch(0, world_size)[rank]
    y = model(x)
    assert (model._is_root, model[1]._is_root) == (True, False)
    y.sum().backward()
    assert model.params_with_grad == list(model.parameters())
    assert not model.has_full_params


@on_ranks(2)
def test_unflattened_parameters_have_clean_names(rank: int) -> None:
    model = model_of(flatten_parameters=False)
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert [p.shape for p in model.params] == [(WIDTH * 5 // 2,), (3,)]
    shared = model[1].params[0]
    model.append_shared_param(shared)
    with pytest.raises(ConfigurationError, match="owns"):
        model.append_shared_param(nn.Parameter(torch.ones(2)))


@on_ranks(1, 2)
def test_state_of_the_inner_part(rank: int, world_size: int) -> None:
    """fairscale's own tests ask the inner part."""
    truth = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh())))
    for flat in (True, False):
        model = model_of(flatten_parameters=flat)
        if world_size == 1:
            found = model.module.state_dict()
            torch.testing.assert_close(dict(found), dict(truth.state_dict()))
        elif flat:
            with pytest.raises(LifecycleError, match="inside of an FSDP module"):
                model.module.state_dict()
        else:
            torch.testing.assert_close(dict(model.module.state_dict()), dict(model.local_state_dict()))
        torch.testing.assert_close(
            dict(pickle.loads(pickle.dumps(model)).state_dict()), dict(truth.state_dict())
        )


class Tied(nn.Module):
    """Two layers with one weight, as in fairscale's tests: two units, and the second is told of the first's."""

    def __init__(self, flat: bool | None) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.l2.weight = self.l1.weight
        if flat is not None:
            self.l1 = FullyShardedDataParallel(self.l1, flatten_parameters=flat)
            self.l2 = FullyShardedDataParallel(self.l2, flatten_parameters=flat)
            self.l2.append_shared_param(self.l1.module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(torch.tanh(self.l1(x)))


def _train_both(model: nn.Module, truth: nn.Module, rank: int, world_size: int) -> None:
    steps_beside(
        rank, world_size, model, truth, lambda m, r, step: m(data(r, step, 3, 4)).pow(2).sum(), steps=range(2)
    )
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=lambda text, n=name: f"{n}: {text}")


@on_ranks(2)
def test_weights_of_another_unit_are_appended(rank: int) -> None:
    for flat in (True, False):
        model = FullyShardedDataParallel(build(lambda f=flat: Tied(f)))
        _train_both(model, build(lambda: Tied(None)), rank, 2)


def _structure(group: Any) -> FullyShardedDataParallel:
    torch.manual_seed(3)
    inner = FullyShardedDataParallel(nn.Linear(4, 5), group)
    return FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 3)), group)


@on_ranks(2)
def test_a_module_that_was_built_in_another_process(rank: int) -> None:
    """Where nobody can be reached, as in a pool's child; it comes pickled, and gets a group where it is loaded."""
    model = pickle.loads(pickle.dumps(_structure(DummyProcessGroup(rank, 2))))
    group, turned = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    with pytest.raises(ConfigurationError, match=r"shard . of 2; the group that it gets has rank 0 of 1"):
        model.process_group = turned
    for m in get_fsdp_instances(model):
        m.process_group = group
    assert model.process_group is group
    assert next(iter(model.state_dict())) == "0.weight"
    assert model.process_group_reduce_scatter.size() == 2
    for m in get_fsdp_instances(model):  # as fairscale's own tests give groups back after unpickling
        m.process_group_reduce_scatter = torch.distributed.new_group()
    assert model.process_group_reduce_scatter is not model.process_group
    with pytest.raises(ConfigurationError, match=r"a group of 1 ranks: .* the 2 that have shards"):
        model.process_group_reduce_scatter = turned
    torch.manual_seed(3)
    _train_both(model, nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), rank, 2)
    with pytest.raises(LifecycleError, match="outermost FSDP module first"):
        model.module[0].process_group = dist.group.WORLD
    alone = _structure(DummyProcessGroup(rank, 2))
    assert alone.local_state_dict()["flat_param_0"].shape == (9,)
    for call in (lambda: alone(torch.ones(1, 4)), alone.state_dict):
        with pytest.raises(ConfigurationError, match="in name only"):
            call()


@on_ranks(2)
def test_state_dicts_on_rank_0_and_through_other_modules(rank: int) -> None:
    model = model_of(state_dict_on_rank_0_only=True, state_dict_device=torch.device("cpu"))
    truth = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh())))
    state = model.state_dict()
    assert list(state) == (list(truth.state_dict()) if rank == 0 else [])
    # through a module that is not sharded, with and without the names of wrappers
    outer = nn.ModuleDict({"net": model_of()})
    outer.load_state_dict({f"net.{k}": v + 1 for k, v in truth.state_dict().items()})
    torch.testing.assert_close(outer.state_dict()["net.0.weight"], truth[0].weight.detach() + 1)
    missing = outer.load_state_dict(
        {"net.0.weight": truth[0].weight, "net.7.bias": torch.ones(1)}, strict=False
    )
    assert missing.missing_keys == ["net.0.bias", "net.1.0.weight", "net.1.0.bias"]
    assert missing.unexpected_keys == ["net.7.bias"]
    with no_pre_load_state_dict_hook(), pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        outer.load_state_dict({f"net.{k}": v for k, v in truth.state_dict().items()})
    outer.load_state_dict({f"net.{k}": v for k, v in truth.state_dict().items()}, assign=True)
    torch.testing.assert_close(outer.state_dict()["net.0.weight"], truth[0].weight.detach())


@on_ranks(2)
def test_options_that_exclude_each_other_and_divide_factors(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision"):
        FullyShardedDataParallel(nn.Linear(2, 2), fp32_reduce_scatter=True)
    with pytest.raises(ConfigurationError, match="move_grads_to_cpu"):
        FullyShardedDataParallel(nn.Linear(2, 2), move_params_to_cpu=True, move_grads_to_cpu=False)
    with pytest.raises(ConfigurationError, match="allow_reset_parameters"):
        FullyShardedDataParallel(nn.Linear(2, 2)).reset_parameters()
    layer = FullyShardedDataParallel(nn.Linear(2, 2), allow_reset_parameters=True)
    before = layer.state_dict()["weight"]
    torch.manual_seed(5)
    layer.reset_parameters()
    assert not torch.equal(layer.state_dict()["weight"], before)
    # sums instead of means
    model = model_of()
    model.set_gradient_divide_factors(1.0, 1.0, recursive=True)
    truth = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh())))
    xs = batch(0, 2)
    model(xs[rank]).sum().backward()
    sum(truth(x).sum() for x in xs).backward()
    size = model[1].params[0].numel()
    flat = torch.cat([p.grad.reshape(-1) for p in truth[1].parameters()])
    mine = flat[rank * size : (rank + 1) * size]
    torch.testing.assert_close(model[1].params[0].grad[: mine.numel()], mine)


@pytest.mark.parametrize("single", [False, True])
@on_ranks(2)
def test_auto_wrap_bn(rank: int, single: bool) -> None:
    model = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    model = auto_wrap_bn(model, single_rank_pg=single)
    assert isinstance(model[1], FullyShardedDataParallel)
    assert model[1].world_size == (1 if single else 2)
    assert not model[1].flatten_parameters
    model = FullyShardedDataParallel(model, mixed_precision=True, compute_dtype=torch.bfloat16)
    model(batch(0, 2)[rank]).float().sum().backward()
    assert model.module[1].params[0].dtype is torch.float32
    assert model.module[1].params[0].grad is not None
    tagged = nn.BatchNorm1d(3)
    tagged.wrapper_config = {}
    with pytest.raises(ConfigurationError, match="wrapper_config"):
        auto_wrap_bn(nn.Sequential(tagged))


@on_ranks(2)
def test_optimizer_state_of_experts_stays_on_their_rank(rank: int) -> None:
    """A part of the model that is each rank's own: its optimizer state stays there."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model = build(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3)))
    torch.manual_seed(rank)
    model[1] = FullyShardedDataParallel(nn.Linear(5, 3), process_group=alone, no_broadcast_optim_state=True)
    model = FullyShardedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(0, 2)[rank]).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    full = model.gather_full_optim_state_dict(optimizer)
    assert (full is None) == (rank == 1)
    everybody = [full]
    dist.broadcast_object_list(everybody, 0)
    shard = model.get_shard_from_optim_state_dict(everybody[0])
    assert everybody[0]["uncollected_local_ids"] == [1]
    optimizer.load_state_dict(shard)
    for index, state in before["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(optimizer.state_dict()["state"][index][key], value)


@on_ranks(2)
def test_state_dicts_have_buffers_in_their_own_dtype(rank: int) -> None:
    """They were half once a forward had run; found by ``shardkit verify``."""
    norms = [nn.BatchNorm1d(WIDTH) for _ in range(2)]
    unit = FullyShardedDataParallel(nn.Sequential(norms[0]), mixed_precision=True)
    model = FullyShardedDataParallel(nn.Sequential(unit, norms[1]), mixed_precision=True)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert {b.running_mean.dtype for b in norms} == {torch.float16}
    state = model.state_dict()
    kinds = {k: v.dtype for k, v in state.items() if "running" in k}
    assert kinds == dict.fromkeys(
        [f"{unit}.running_{what}" for unit in ("0.0", "1") for what in ("mean", "var")], torch.float32
    )
