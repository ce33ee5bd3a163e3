"""Paths, names and arguments of fairscale's earlier versions, and its inner helpers' refusal of wrong calls."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import shardkit
from shardkit import compat
from shardkit.errors import ConfigurationError, LifecycleError, RedirectedError
from shardkit.internal import containers
from shardkit.internal import object as objects
from shardkit.internal.reduce_scatter_bucketer import ReduceScatterBucketer
from shardkit.nn import FlattenParamsWrapper, FullyShardedDataParallel
from shardkit.nn.data_parallel import fsdp_optim_utils
from shardkit.nn.misc import GradBucket, ParamBucket
from shardkit.optim import OSS
from shardkit.optim.layerwise_gradient_scaler import LayerwiseGradientScaler
from shardkit.utils.testing import DummyProcessGroup
from tests.pools import on_ranks
from tests.started import output_of

MOVED = {
    **{f"utils.{m}": f"internal.{m}" for m in
       ("containers", "object", "parallel", "params", "reduce_scatter_bucketer", "state_dict", "version")},
    "utils.testing": "fair_dev.testing.testing",
    "nn.misc.checkpoint_activations": "nn.checkpoint.checkpoint_activations",
    "nn.auto_wrap": "nn.wrap.auto_wrap",
    "optim.utils": "internal.params",
    "checkpoint_tools": "checkpoint.tools",
    **{m: f"training.{m}" for m in ("data", "out_of_memory", "whole_parameters")},
    **{m: f"tools.{m}" for m in ("estimate", "rehearsal")},
}  # fmt: skip

# Modules that fairscale's packages have as attributes, for they import them.
ATTRIBUTES = [
    "internal.containers",
    "nn.checkpoint.checkpoint_activations",
    "nn.data_parallel.fsdp_optim_utils",
    "nn.misc.param_bucket",
    "nn.model_parallel.initialize",
    "nn.moe.moe_layer",
    "nn.pipe.skip.namespace",
    "optim.grad_scaler",
]


@pytest.mark.parametrize("old", MOVED)
def test_moved_modules(old: str) -> None:
    before, now = (importlib.import_module(f"shardkit.{path}") for path in (old, MOVED[old]))
    public = getattr(before, "__all__", None)
    assert before is now or public
    for name in public or ():
        assert getattr(before, name) is getattr(now, name), name


def test_parts_after_importing_the_package_alone() -> None:
    parts = ["model_parallel", "pipeline", "extra", *compat.PARTS]
    code = "import shardkit, sys\n"
    code += f"for part in {parts}: assert getattr(shardkit, part) is sys.modules[f'shardkit.{{part}}']"
    code += "\nassert shardkit.moe.__name__ == 'shardkit.model_parallel.moe'"
    code += "".join(f"\nassert shardkit.{path}" for path in ATTRIBUTES)
    output_of("-c", code)


def test_the_package_alone() -> None:
    assert shardkit.nn.FullyShardedDataParallel is FullyShardedDataParallel
    assert shardkit.__version_tuple__ == tuple(int(n) for n in shardkit.__version__.split("."))
    with pytest.raises(AttributeError):
        _ = shardkit.no_such_part


@pytest.mark.parametrize("kind", ["skip_if_cuda", "skip_if_no_cuda", "skip_if_py38", "skip_due_to_flakyness"])
def test_marks(kind: str) -> None:
    from shardkit.fair_dev.testing import testing

    assert isinstance(getattr(testing, kind), pytest.MarkDecorator)
    assert getattr(importlib.import_module("shardkit.utils.testing"), kind) == getattr(testing, kind)


def test_ssd_offload_is_refused() -> None:
    group = DummyProcessGroup(0, 1)
    with pytest.raises(RedirectedError, match="move_params_to_cpu"):
        FullyShardedDataParallel(nn.Linear(1, 1), group, offload_config=object())
    with pytest.raises(RedirectedError, match="OffloadPolicy"):
        FlattenParamsWrapper(nn.Linear(1, 1), ssd_offload=True)
    assert FlattenParamsWrapper(nn.Linear(1, 1), ssd_offload=False, ssd_directory="").num_params_managed == 2
    from shardkit.nn.data_parallel import OffloadConfig

    with pytest.raises(RedirectedError, match="move_params_to_cpu"):
        OffloadConfig(offload_type="ssd_offload")


@on_ranks(2)
def test_broadcast_object(rank: int, world_size: int) -> None:
    from shardkit.optim.utils import broadcast_object

    got = broadcast_object({"x": torch.full((2,), float(rank)), "n": rank}, 1)
    assert got["n"] == 1
    assert torch.equal(got["x"], torch.ones(2))


@on_ranks(2)
def test_a_bucket_of_one_element(rank: int) -> None:
    """A column of the bucket, whose rows are apart: its elements are no neighbours."""
    bucketer, found = ReduceScatterBucketer(bucket_cap_mb=1), []
    rows = [torch.full((1,), 10.0 * rank + r) for r in range(2)]
    bucketer.reduce_scatter_async(rows, torch.distributed.group.WORLD, found.append)
    bucketer.flush()
    assert [float(f) for f in found] == [10.0 + 2 * rank]


def test_optimizer_state_helpers() -> None:
    assert fsdp_optim_utils.is_singleton_tensor(torch.tensor(1.0))
    assert not fsdp_optim_utils.is_singleton_tensor(torch.ones(1))
    state = {"param_id_map": {0: 0, 1: 0, 2: 1}, "state": {0: {}}}
    fsdp_optim_utils.check_param_counts_before_sharding(state, 2)
    with pytest.raises(ConfigurationError, match="saved from 2 FSDP instances, this model has 3"):
        fsdp_optim_utils.check_param_counts_before_sharding(state, 3)
    with pytest.raises(RedirectedError, match="get_shard_from_optim_state_dict"):
        fsdp_optim_utils.flatten_optim_state_dict(state)


def test_wrong_calls() -> None:
    with pytest.raises(ConfigurationError, match="2 names"):
        containers.unpack_kwargs(("a", "b"), (1,))
    with pytest.raises(ConfigurationError, match="1 tensors and 0 other"):
        containers.unpack_non_tensors((torch.ones(1),), {"is_tensor": [True, False], "objects": []})
    with pytest.raises(ConfigurationError, match="increase fixed_buffer_size"):
        objects.pyobject_to_tensor("x" * 50, fixed_buffer_size=10)
    with pytest.raises(ConfigurationError, match="1 tensors for 2 ranks"):
        ReduceScatterBucketer().reduce_scatter_async([torch.ones(1)], DummyProcessGroup(0, 2))
    bucketer = ReduceScatterBucketer()
    bucketer.reduce_scatter_async([torch.ones(1)] * 2, DummyProcessGroup(0, 2))
    with pytest.raises(LifecycleError, match="call flush"):
        bucketer.teardown()
    bucket = ParamBucket(3, torch.float32, torch.device("cpu"))
    first = nn.Parameter(torch.ones(2))
    bucket.add_param(first)
    with pytest.raises(ConfigurationError, match="already"):
        bucket.add_param(first)
    with pytest.raises(ConfigurationError, match="2 of 3"):
        bucket.add_param(nn.Parameter(torch.ones(2)))
    with pytest.raises(ConfigurationError, match="float64"):
        bucket.add_param(nn.Parameter(torch.ones(1).double()))
    grads = GradBucket(3, torch.float32, torch.device("cpu"), 0)
    with pytest.raises(LifecycleError, match="add_grad"):
        grads.rebuild()
    grads.add_grad(first)
    grads.collapse()
    with pytest.raises(LifecycleError, match="rebuild"):
        grads.shrink()


@pytest.mark.parametrize("name", ["body", "nowhere"])
def test_layers_that_cannot_be_scaled(name: str) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ConfigurationError, match=rf"{name}.*body\.0"):
        LayerwiseGradientScaler(model, {name: 2.0})
    with pytest.raises(ConfigurationError, match="growth_factor"):
        LayerwiseGradientScaler(model, {"body.0": 2.0}, growth_factor=1.0)


@on_ranks(2)
def test_old_names_of_oss(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sharded = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    sharded.step()
    part = sharded.local_state_dict()
    assert part["param_groups"][0]["momentum"] == 0.9
    held = [p.numel() for p in model.parameters() if sharded.param_to_rank[p] == rank]
    assert sum(s["momentum_buffer"].numel() for s in part["state"].values()) == sum(held)
    assert sharded.get_global_rank(None, rank) == rank
    with pytest.raises(RedirectedError, match="load_state_dict"):
        sharded.rank_local_state_dict(0, {})


@pytest.mark.parametrize("name", ["SsdBuffer", "SsdFlatParameter", "SsdParameter", "SsdTensorHandle"])
def test_ssd_classes_are_redirected(name: str) -> None:
    from shardkit.experimental.nn import ssd_offload

    with pytest.raises(RedirectedError, match="move_params_to_cpu"):
        getattr(ssd_offload, name)(1)
