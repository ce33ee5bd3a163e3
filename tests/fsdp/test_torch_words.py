"""fully_shard with the arguments and methods of torch's (FSDP2), and device meshes in place of groups."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchsOffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torchs_registration
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Shard

from shardkit import (
    FSDP,
    OSS,
    SentWeights,
    ShardedDDP,
    ShardedGradScaler,
    WholeParameters,
    fully_shard,
    register_fsdp_forward_method,
    restore_training,
    save_training,
    sharding_of,
)
from shardkit.errors import ConfigurationError, LifecycleError, RankMismatchError
from shardkit.fsdp.fully_shard import METHODS, TorchsArguments
from shardkit.policy import PrecisionPolicy, ReshardPolicy
from tests.beside import assert_same, steps_beside, train_beside, whole
from tests.pools import on_ranks
from tests.started import output_of

common: Any = _fsdp_common


class Dims(NamedTuple):
    """torch's DataParallelMeshDims, which torch has from 2.13 on."""

    shard: str | None
    replicate: str | None
    shard_names = property(lambda self: (self.shard,) if self.shard else ())
    replicate_names = property(lambda self: (self.replicate,) if self.replicate else ())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)]
        )
        self.norm, self.output = nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(self.norm(x))

    def scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """Uses parameters without calling the modules that have them, and the module itself."""
        return self(tokens).detach().mean() + (self.words.weight[tokens] @ self.output.weight.T).sum()


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = tokens(rank, step)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def as_in_torchtitan(model: Net, **options: Any) -> Net:
    options = {"dtensors": False, **options}
    fully_shard(model.words, **options, reshard_after_forward=True)
    for layer in model.layers:
        fully_shard(layer, **options, reshard_after_forward=True)
    for one, following in zip(model.layers, model.layers[1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
    both = [model.norm, model.output]
    assert fully_shard(both, **options, reshard_after_forward=False) is both
    return fully_shard(model, **options)


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Of one dimension, and of two: every rank a replica."""
    world = dist.get_world_size()
    return (
        init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)),
        init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_replicate", "dp_shard")),
    )


@on_ranks(2)
def test_a_script_for_torchs_changes_one_import(rank: int) -> None:
    flat, hybrid = meshes()
    kept = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    cases: list[dict[str, Any]] = [
        {"mesh": flat, "mp_policy": kept, "offload_policy": TorchsOffloadPolicy()},
        {"mesh": hybrid, "offload_policy": CPUOffloadPolicy()},
        {"mesh": flat, "factor": 4.0},
    ]
    for options in cases:
        factor = options.pop("factor", 2.0)
        model, plain = as_in_torchtitan(Net(), **options, dtensors=None), Net()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        if factor != 2.0:
            for m in model.modules():
                if hasattr(m, "set_gradient_divide_factor"):
                    m.set_gradient_divide_factor(factor)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2) for m in (model, plain)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if step == 1:
                model.set_reshard_after_forward(False)
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                (loss_of(model, rank, 2 * step + micro) / 2).backward()
                both = [loss_of(plain, r, 2 * step + micro) for r in range(2)]
                (torch.stack(both).sum() / (2 * factor)).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-5, atol=1e-7)  # type: ignore[attr-defined]
            for optimizer in optimizers:
                optimizer.step()
        assert_same(model, plain, rtol=0, atol=1e-6)


@on_ranks(2)
def test_values_between_steps(rank: int) -> None:
    """unshard, reshard, registered methods, dtypes of outputs; also in copies."""
    plain, model = Net(), as_in_torchtitan(Net())
    with pytest.raises(LifecycleError, match="summon_full_params"):
        model.scores(tokens(rank, 0))
    register_fsdp_forward_method(model, "scores")
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # as in torch: nothing
    for m in (model, copy.deepcopy(model)):
        handle = m.layers[1].unshard(async_op=True)
        handle.wait()
        torch.testing.assert_close(m.layers[1][0].weight, plain.layers[1][0].weight, rtol=0, atol=0)
        m.layers[1].reshard()
        with pytest.raises(LifecycleError):
            m.layers[1][0].weight.sum()
        m.layers[0].unshard()  # the next forward ends it
        loss_of(m, rank, 0).backward()
        assert all(p.grad is not None for p in m.parameters())
        with pytest.raises(LifecycleError, match="summon_full_params"):
            Net.scores(m, tokens(rank, 0))
    whole = fully_shard(Net())  # everything in the root
    register_fsdp_forward_method(whole, "scores")
    mesh = init_device_mesh("cpu", (2,))
    named = fully_shard(Net(), mesh=mesh)
    assert (named._get_name(), type(named).__name__) == ("Net", "FSDPNet")  # Trainer asks for the first
    compiled = fully_shard(torch.compile(Net(), backend="eager"), mesh=mesh)
    register_fsdp_forward_method(compiled, "scores")  # of the module inside
    torch.testing.assert_close(compiled.scores(tokens(rank, 0)), plain.scores(tokens(rank, 0)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (whole, plain)]
    for step in range(2):
        x = tokens(0, step)
        results = [m.scores(x) for m in (whole, plain)]
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
        for result, optimizer in zip(results, optimizers, strict=True):
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole, plain, rtol=0, atol=1e-6)
    half = fully_shard(
        Net(),
        dtensors=False,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
    )
    assert half(tokens(rank, 0)).dtype == torch.float32
    assert loss_of(half, rank, 0).item() != loss_of(plain, rank, 0).item()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtensors", [True, False])
def test_what_changes_values_ends_unshard(rank: int, world_size: int, dtensors: bool) -> None:
    """What was loaded, or written inside of summon_full_params, went into a copy that the next forward gave back."""
    plain, model = Net(), as_in_torchtitan(Net(), dtensors=dtensors)
    units: list[Any] = [model.layers[1], model]
    x = tokens(rank, 0)
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    for m in units:
        m.unshard()
    model.load_state_dict(doubled)
    plain.load_state_dict(doubled)
    torch.testing.assert_close(model(x), plain(x))
    for m in units:
        m.unshard()
    with sharding_of(model).summon_full_params(), torch.no_grad():
        model.layers[1][0].weight.fill_(0.5)
    nn.init.constant_(plain.layers[1][0].weight, 0.5)
    torch.testing.assert_close(model(x), plain(x))
    for m in units:
        m.unshard()
    found = model.state_dict()
    assert {isinstance(value, DTensor) for value in found.values()} == {dtensors}
    assert_same(model, plain, rtol=0, atol=0)
    for m in units:
        m.unshard()
    torch.testing.assert_close(model.double()(x), plain.double()(x))

    words = {"dtensors": dtensors, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    half: Any = fully_shard(nn.Linear(4, 3), **words)
    own = {name: value.detach().clone() for name, value in whole(half.state_dict()).items()}
    for _ in range(2):
        half.unshard()
        assert torch.equal(half.weight, own["weight"].bfloat16())
        half.reshard()
        half.unshard()
        data = torch.ones(1, 4)
        torch.testing.assert_close(
            half(data), nn.functional.linear(*(v.bfloat16() for v in (data, *own.values())))
        )
    torch.testing.assert_close(whole(half.state_dict()), own, rtol=0, atol=0)
    half.unshard()  # shows narrower numbers than those that are loaded
    half.load_state_dict(thirds := {name: value / 3 for name, value in own.items()})
    torch.testing.assert_close(whole(half.state_dict()), thirds, rtol=0, atol=0)


WRITES: dict[str, Any] = {
    "in place": lambda w: w.mul_(2),
    "a part": lambda w: w[-1:].fill_(3),
    "data": lambda w: w.data.mul_(2),
    "other data": lambda w: setattr(w, "data", w.data * 2),
}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtensors", [True, False])
def test_what_is_written_after_unshard(rank: int, world_size: int, dtensors: bool) -> None:
    """It was lost at the next forward; it is kept, whatever ends it, or refused where it can't be."""
    x = tokens(rank, 0)
    ends = (lambda m: m(x), lambda m: m.layers[1].reshard(), lambda m: m.state_dict())
    for (name, write), end in itertools.product(WRITES.items(), ends):
        plain, model = Net(), as_in_torchtitan(Net(), dtensors=dtensors)
        model.layers[1].unshard()  # type: ignore[operator]
        with torch.no_grad():
            for m in (model, plain):
                write(m.layers[1][0].weight)
        end(model)
        torch.testing.assert_close(model(x), plain(x))
        assert_same(model, plain, name, rtol=0, atol=0)

    half: Any = fully_shard(
        nn.Linear(4, 3), dtensors=dtensors, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )
    both: Any = fully_shard(nn.Linear(4, 3), dtensors=dtensors)
    (shard, *_), own = both.parameters(), [whole(m.state_dict()) for m in (half, both)]
    for m, write in itertools.product((half, both), WRITES.values()):
        m.unshard()
        with torch.no_grad():
            write(m.weight)
            if m is both:
                shard.copy_(shard.clone())
        with pytest.raises(
            LifecycleError, match=rf"^rank {rank}: parameter 'weight' was written to .* unshard\(\)"
        ):
            m(torch.ones(1, 4))
        m(torch.ones(1, 4))  # it is said once
    for m, before in zip((half, both), own, strict=True):
        torch.testing.assert_close(whole(m.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtensors", [True, False])
def test_a_program_that_ends_after_unshard(dtensors: bool) -> None:
    """Found: what was written was brought to the shards at the interpreter's end, which aborted the process."""
    assert output_of("-m", "tests.programs.left_unsharded", str(dtensors)).splitlines()[-1] == "end"


class Twice(Net):
    """Its forward calls the module itself, and uses its own parameters after that."""

    def forward(self, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
        inner = self(tokens, 0) if depth else super().forward(tokens)
        return inner + self.output.bias * self.norm.weight.sum()


@on_ranks(2)
def test_a_forward_that_calls_its_own_module(rank: int) -> None:
    model, plain = as_in_torchtitan(Twice()), Twice()
    whole = fully_shard(Twice())
    for m in (model, whole):
        with torch.no_grad():
            torch.testing.assert_close(whole(tokens(rank, 0)), plain(tokens(rank, 0)), rtol=0, atol=1e-6)
        truth = copy.deepcopy(plain)
        train_beside(rank, 2, m, truth, loss_of, steps=range(2))
    with pytest.raises(IndexError):
        whole(torch.full((1, 1), 99))
    # an error leaves nothing behind
    torch.testing.assert_close(whole(tokens(rank, 0)), truth(tokens(rank, 0)), rtol=0, atol=1e-6)


@on_ranks(2)
def test_meshes_wherever_a_group_is_taken(rank: int) -> None:
    flat, hybrid = meshes()
    for mesh in (flat, hybrid):
        model, plain = Net(), Net()
        optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.05, eps=1e-2, mesh=mesh)
        wrapped = ShardedDDP(model, optimizer, mesh=mesh)
        scaler = ShardedGradScaler(init_scale=8.0, mesh=mesh)
        scaler.scale(loss_of(wrapped, rank, 0)).backward()
        scaler.step(optimizer)
        torch.stack([loss_of(plain, r, 0) for r in range(2)]).mean().backward()
        torch.optim.AdamW(plain.parameters(), lr=0.05, eps=1e-2).step()
        assert_same(model, plain, rtol=0, atol=1e-6)
        wrapper = FSDP(Net(), mesh=mesh)
        assert sum(p.numel() for p in wrapper.parameters()) <= 1 + sum(
            p.numel() for p in plain.parameters()
        ) / (mesh.size(mesh.ndim - 1))


# ------------------------------------------------------------------------------------ torch.distributed.checkpoint
def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)


def _steps(model: Net, optimizer: torch.optim.Optimizer, ranks: list[int], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.stack([loss_of(model, r, step) for r in ranks]).mean().backward()
        optimizer.step()


@on_ranks(2)
def test_torchs_functions_for_state(rank: int, tmp_path: Path) -> None:
    """State of optimizers is that of one process, by names, to torch's functions; before the first step too."""
    model, plain = as_in_torchtitan(Net()), Net()
    optimizer, truth = adam(model), adam(plain)
    _steps(model, optimizer, [rank], range(2))
    _steps(plain, truth, [0, 1], range(2))
    for given in ({}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}):
        options = StateDictOptions(**given)  # type: ignore[arg-type]
        found, expected = (
            get_optimizer_state_dict(m, o, options=options) for m, o in ((model, optimizer), (plain, truth))
        )
        assert list(found) == list(expected)
        for part in [k for k in found if k.startswith("state")]:
            torch.testing.assert_close(found[part], expected[part], rtol=0, atol=1e-6)
        assert found.get("param_groups") == expected.get("param_groups")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    whole = [copy.deepcopy(s) for s in get_state_dict(plain, truth)]
    _steps(plain, truth, [0, 1], range(2, 4))
    for given in (
        None,
        {},
        {"full_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ):
        again = as_in_torchtitan(Net())
        optimizer = adam(again)
        if given is None:
            weights, state = get_state_dict(again, optimizer)
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=tmp_path)
            set_state_dict(
                again, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
            )
        else:
            set_model_state_dict(again, whole[0])
            mine = {} if given.get("broadcast_from_rank0") and rank else copy.deepcopy(whole[1])
            set_optimizer_state_dict(again, optimizer, mine, options=StateDictOptions(**given))  # type: ignore[arg-type]
        _steps(again, optimizer, [rank], range(2, 4))
        assert_same(again, plain, rtol=0, atol=1e-6)


class Mixed(Net):
    """With a stack of matrices, which has to be contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 4, 6) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = nn.functional.linear(self.words(tokens), self.stack.view(12, 6))
        return super().forward(tokens) * weights.mean(-1, keepdim=True)


@on_ranks(2)
def test_parameters_cut_along_other_dimensions(rank: int, tmp_path: Path) -> None:
    """Parameters that are cut within their rows are trained and saved as those that are cut between them."""

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim == 3 else Shard(-1) if p.shape[1:] == (6,) else None

    model, plain = as_in_torchtitan(Mixed(), dtensors=True, shard_placement_fn=place), Mixed()
    theirs: Any = torchs_fully_shard(Mixed(), shard_placement_fn=place)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert (p.placements, p.to_local().shape) == (q.placements, q.to_local().shape)  # type: ignore[attr-defined]
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0, atol=0)  # type: ignore[attr-defined]
    optimizer, truth = adam(model), adam(plain)
    with sharding_of(model).no_sync():
        loss_of(model, rank, 7).backward()
    loss_of(model, rank, 8).backward()
    torch.stack([loss_of(plain, r, step) for r in range(2) for step in (7, 8)]).sum().div(2).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[attr-defined]
    for one in (optimizer, truth):
        one.step()
    _steps(model, optimizer, [rank], range(2))
    _steps(plain, truth, [0, 1], range(2))
    with sharding_of(model).summon_full_params(writeback=True):
        model.layers[0][0].weight.detach().mul_(2)
    plain.layers[0][0].weight.detach().mul_(2)
    assert_same(model, plain, rtol=0, atol=1e-6)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{tmp_path}/dcp")
    dcp.save(sharding_of(model).sharded_state_dict(), checkpoint_id=f"{tmp_path}/pieces")
    save_training(f"{tmp_path}/own", step=1, model=model, optimizer=optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    for name, change in sharding_of(model).export(since=SentWeights()):
        made = torch.zeros(plain.get_parameter(name).shape)
        change.apply(made)  # type: ignore[union-attr]
        torch.testing.assert_close(made, plain.get_parameter(name).detach(), rtol=0, atol=1e-6)
    _steps(plain, truth, [0, 1], range(2, 4))
    for way, chosen in (("dcp", None), ("own", None), ("own", place), ("pieces", place)):
        again = as_in_torchtitan(Mixed(), dtensors=True, shard_placement_fn=chosen)
        second = adam(again)
        if way == "dcp":
            weights, state = get_state_dict(again, second)
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=f"{tmp_path}/dcp")
            set_state_dict(again, second, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
        elif way == "own":
            restore_training(f"{tmp_path}/own", model=again, optimizer=second)
        else:
            dcp.load(sharding_of(again).sharded_state_dict(), checkpoint_id=f"{tmp_path}/pieces")
            second.load_state_dict(kept)
        _steps(again, second, [rank], range(2, 4))
        assert_same(again, plain, rtol=0, atol=1e-6)
    with pytest.raises(ConfigurationError, match="'stack' is cut along a later dimension"):
        WholeParameters(model, torch.optim.AdamW, lr=0.1)


@on_ranks(2)
def test_what_has_no_counterpart_is_refused(rank: int) -> None:
    flat, _ = meshes()
    elsewhere = SimpleNamespace(placement=None, mesh_info=SimpleNamespace(mesh=flat))  # as torch 2.13 has it
    deep = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mesh": flat, "group": dist.group.WORLD}, "both mesh and a group"),
        ({"mesh": dist.group.WORLD}, "pass a torch.distributed.device_mesh"),
        ({"mesh": deep}, "expects a 1D or 2D DeviceMesh but got DeviceMesh"),
        (
            {"reshard_after_forward": True, "reshard": ReshardPolicy()},
            "both reshard_after_forward and reshard",
        ),
        (
            {"mp_policy": MixedPrecisionPolicy(), "precision": PrecisionPolicy()},
            "both mp_policy and precision",
        ),
        ({"shard_placement_fn": lambda p: Shard(1)}, r"'layers.0.0.bias' .*: Shard dim 1 is invalid for 1D"),
        (
            {"shard_placement_fn": lambda p: Shard(1 - p.ndim)},
            r"Shard\(1\) for 'layers.0.2.weight': .* uneven",
        ),
        ({"shard_placement_fn": lambda p: elsewhere if p.ndim == 1 else None}, "in modules of their own"),
        ({"mesh": flat, "dp_mesh_dims": Dims("fsdp", None)}, "it has no 'fsdp'"),
        ({"mesh": flat, "dp_mesh_dims": Dims(None, "dp")}, "DistributedDataParallel"),
        ({"dtensors": True}, "containers that do not implement forward"),
        (
            {"dtensors": False, "shard_placement_fn": lambda p: Shard(0)},
            "pass dtensors=True, or leave it out",
        ),
        (
            {"precision": PrecisionPolicy(), "shard_placement_fn": lambda p: Shard(p.ndim - 1)},
            "says how DTensors are cut",
        ),
    ]
    for options, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            fully_shard(Net().layers if options.get("dtensors") else Net(), **options)
    with pytest.raises(TypeError, match="reshard_after"):
        fully_shard(Net(), reshard_after=True)  # type: ignore[call-arg]
    if hasattr(torch.Tensor, "grad_dtype"):
        half = nn.Linear(2, 2, dtype=torch.bfloat16)
        half.weight.grad_dtype = torch.float32  # type: ignore[assignment]
        with pytest.raises(
            ConfigurationError, match=r"'weight' of torch.bfloat16 has grad_dtype=torch.float32"
        ):
            fully_shard(half)
    model: Any = as_in_torchtitan(Net())
    with pytest.raises(ConfigurationError, match=r"needs allocate\(size"):
        model.set_custom_all_gather(print)
    model.set_allocate_memory_from_process_group_for_comm(True)
    for comm, send in ((Gather(), model.set_custom_all_gather), (Scatter(), model.set_custom_reduce_scatter)):
        send(comm)  # as in torch, this can still be said afterwards
        for where in (model.set_allocate_memory_from_process_group_for_comm, model.set_symm_mem_for_comm):
            with pytest.raises(AssertionError, match="says where they lie"):
                where(False)
        send(None)
        model.set_symm_mem_for_comm()
    changes: Any = fully_shard(nn.Linear(2, 2), reshard=ReshardPolicy(sends_changes=True))
    with pytest.raises(ConfigurationError, match="set_all_reduce_hook is for plain messages"):
        changes.set_all_reduce_hook(print)
    with pytest.raises(ConfigurationError, match="memory of gathered parameters"):
        model.set_keep_unsharded_storage(recurse=False, keep=True)
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(False)
    assert model.finalize_backward() is None
    assert model.finalize_backward(async_op=True).wait() is None
    with pytest.raises(ConfigurationError, match="Net'> does not have a method nothing"):
        register_fsdp_forward_method(model, "nothing")
    with pytest.raises(ConfigurationError, match=r"can only be applied to a module once\."):
        fully_shard(model)
    rows = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    for inside in (fully_shard(nn.Linear(2, 2), mesh=flat), rows):
        with pytest.raises(
            ConfigurationError, match="torch's fully_shard can't be around a module that is sharded"
        ):
            torchs_fully_shard(nn.Sequential(inside), mesh=flat)
        around: Any = torchs_fully_shard(
            nn.Sequential(inside), mesh=flat, ignored_params={*inside.parameters()}
        )
        if inside is not rows:
            with pytest.raises(ConfigurationError, match="torch's fully_shard can't be around"):
                around(torch.zeros(1, 2))
    around(torch.zeros(1, 2)).sum().backward()
    with pytest.raises(ConfigurationError, match="Invalid shard_placement_fn result 1 for 'weight'"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: 1)
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(nn.Linear(3, 2), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(ConfigurationError, match="should be a bool, got <class 'int'>"):
        cast("Any", fully_shard(nn.Linear(2, 2), mesh=flat)).set_reshard_after_forward(2)
    late: Any = fully_shard(nn.Linear(2, 2), mesh=flat)
    late.weight._local_tensor.fsdp_pre_all_gather = print
    for _ in range(2):
        with pytest.raises(LifecycleError, match="got fsdp_pre_all_gather too late"):
            late(torch.zeros(1, 2))
    with torch.device("meta"):
        empty: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for part in (*empty, empty):
        fully_shard(part, mesh=flat)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"still on meta device: \['0.weight', '0.bias'\]"):
            empty(torch.zeros(1, 2))
    empty.to_empty(device="cpu")
    for p in empty.parameters():
        nn.init.constant_(p, 0.5)
    assert empty(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


@on_ranks(2, 3)
def test_what_torchs_own_functions_find(rank: int, world_size: int) -> None:
    """A module's private state is one object, of which the root's knows all; torch's replicate leaves units alone."""
    model: Any = as_in_torchtitan(Net(), dtensors=True)
    assert {*_get_managed_modules((nn.Sequential(model),))}.isdisjoint(model.modules())
    state = model._get_fsdp_state()
    assert state is model._get_fsdp_state() is _get_module_fsdp_state(model)
    assert state._is_root is None
    share: Any = getattr(torch.distributed.fsdp, "share_comm_ctx", None)
    if share is not None:  # from torch 2.12 on
        share([model, *model.layers])
        with pytest.raises(ValueError, match="Expects list of FSDPModules"):
            share([nn.Tanh()])
    state._lazy_init()
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    found = state._state_ctx.all_states
    assert found == [m._get_fsdp_state() for m in units]  # type: ignore[attr-defined]
    assert [s._is_root for s in found] == [True] + [False] * (len(units) - 1)
    handle = model.unshard(async_op=True)
    assert isinstance(handle, torch.distributed.fsdp.UnshardHandle)
    handle.wait()
    model.reshard()

    plain, around = Net(), Net()
    fully_shard(around.layers[1], mesh=init_device_mesh("cpu", (world_size,)))
    replicate(around)
    steps_beside(rank, world_size, around, plain, loss_of, steps=range(2))
    assert_same(around, plain, rtol=0, atol=1e-6)


class Scales(nn.Module):
    """Computes with frozen weights of a dtype that gloo has no name for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.randint(1, 5, (5,)).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.float()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.uint8])
def test_frozen_weights_of_any_dtype(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """The gather of float8 ended in an error of gloo's, in the forward."""
    plain, model = Scales(dtype), fully_shard(Scales(dtype), mesh=init_device_mesh("cpu", (world_size,)))
    data = torch.randn(2, world_size, 3, 4, generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(m.inner.parameters(), lr=0.1) for m in (model, plain)]
    steps_beside(
        rank,
        world_size,
        model,
        plain,
        lambda m, r, step: m(data[step, r]).square().mean(),
        optimizers,
        range(2),
    )
    torch.testing.assert_close(whole(model.inner.state_dict()), whole(plain.inner.state_dict()))


# ------------------------------------------------------------------------------------ as torch's FSDPModule
@on_ranks(1)
def test_all_of_torchs_is_there(rank: int) -> None:
    """What this torch's users call and pass is known here; a newer torch that has more makes this fail."""
    names = [n for n, value in vars(FSDPModule).items() if callable(value) and n not in ("__new__", "_apply")]
    assert [n for n in names if n not in (*METHODS, "_get_fsdp_state")] == []
    model: Any = fully_shard(nn.Linear(2, 2))
    assert [n for n in names if n != "_get_fsdp_state" and not hasattr(model, n)] == []
    assert not isinstance(model, FSDPModule)
    arguments = inspect.signature(torchs_fully_shard).parameters
    assert set(arguments) <= {*inspect.signature(fully_shard).parameters, *TorchsArguments.__annotations__}
    model = fully_shard(nn.Linear(2, 2), reshard_after_forward=True)
    assert type(model).__mro__[1:3] == (FSDPModule, nn.Linear)
    assert all(vars(type(model)).get(n) is not None for n in names)
    assert isinstance(fully_shard(nn.Sequential(model)), FSDPModule)  # as what is inside
    for sliced in (fully_shard(nn.Sequential(nn.Tanh(), nn.Tanh()), dtensors=True)[:1],):
        assert type(sliced) is nn.Sequential


@on_ranks(1)
def test_ranks_that_are_threads_of_torchs(rank: int) -> None:
    """As torch's own tests run: ranks are threads of one process, over a process group of theirs."""
    from torch.testing._internal.distributed import multi_threaded_pg as theirs

    store, failed = dist.HashStore(), []

    def run(number: int) -> None:
        try:
            dist.init_process_group("threaded", rank=number, world_size=2, store=store)
            model, mesh = (
                models[number],
                init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")),
            )
            for part in (*model.layers, model):
                fully_shard(part, mesh=mesh)
            loss_of(model, number, 0).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert_same(model, plain, rtol=0, atol=1e-6)
        except BaseException as error:
            failed.append(error)
            raise

    plain, *models = Net(), Net(), Net()  # threads share a generator
    torch.stack([loss_of(plain, r, 0) for r in range(2)]).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    theirs._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        theirs._uninstall_threaded_pg()
    assert not failed, failed


def gathers_of(model: nn.Module) -> list[str]:
    """Labels of all-gathers from now on."""
    heard: list[str] = []
    for flat in sharding_of(model)._state.all_flats():
        flat.on_gather = lambda full, shard, flat=flat: heard.append(flat.paths[0])  # type: ignore[misc]
    return heard


@on_ranks(2)
def test_modules_that_are_one_unit(rank: int) -> None:
    """A list of modules is gathered once and reduced once; names are right wherever state is asked for."""
    model, plain = as_in_torchtitan(Net(), dtensors=True), Net()
    optimizers = [adam(m) for m in (model, plain)]
    model.norm.set_reshard_after_forward(True, recurse=False)  # else the list stays gathered in any case
    heard = gathers_of(model)
    counts = []
    for step in range(3):
        _steps(model, optimizers[0], [rank], range(step, step + 1))
        _steps(plain, optimizers[1], [0, 1], range(step, step + 1))
        counts.append(len(heard))
        heard.clear()
    # each layer again in backward, and the words; the list, too, as long as nobody knows that it comes last
    assert counts == [5 + 5, 5 + 4, 5 + 4]
    assert_same(model, plain, rtol=0, atol=1e-6)
    pieces = sharding_of(model).sharded_state_dict()
    assert set(pieces) == set(plain.state_dict())
    assert {n: v.shape for n, v in pieces.items()} == {n: v.shape for n, v in plain.state_dict().items()}
    state = get_optimizer_state_dict(model, optimizers[0])
    assert list(state["state"]) == [n for n, _ in plain.named_parameters()]
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    for m, ranks in ((twin, [rank]), (plain, [0, 1])):
        _steps(m, torch.optim.SGD(m.parameters(), lr=0.1), ranks, range(3, 4))
    assert_same(twin, plain, rtol=0, atol=1e-6)
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with torch.no_grad():
        assert model(tokens(rank, 0)).dtype == torch.float64
    with torch.device("meta"):
        empty = as_in_torchtitan(Net(), dtensors=True)
    empty.to_empty(device="cpu")
    empty.load_state_dict(plain.state_dict())
    torch.testing.assert_close(empty(tokens(rank, 0)), plain(tokens(rank, 0)))


class Gather:
    """Sends itself; counts what it is asked for, and looks whether memory is its own."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.full(tuple(size), 7, dtype=dtype, device=device)
        self.memory.append(made.untyped_storage().data_ptr())
        return made

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.note(output_tensor, input_tensor)
        sends = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return sends(output_tensor, input_tensor, group=group, async_op=async_op)

    def note(self, *tensors: torch.Tensor) -> None:
        self.calls += 1
        assert {t.untyped_storage().data_ptr() for t in tensors} <= set(self.memory)
        self.memory.clear()


class Scatter(Gather):
    """Exchanges parts, and adds them up; forms their mean where it may be asked for that."""

    only_sums = False

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.note(output_tensor, input_tensor)
        came = torch.empty_like(input_tensor)
        dist.all_to_all_single(came, input_tensor, group=group)
        torch.sum(came.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG and not self.only_sums:
            output_tensor.div_(group.size())
        else:
            assert op == dist.ReduceOp.SUM


class Partly(Net):
    """Frozen and trainable parameters in one unit; maybe a parameter that not all ranks have a gradient for."""

    def __init__(self, lacks: bool = True) -> None:
        super().__init__()
        self.lacks = lacks
        self.layers[0][0].requires_grad_(False)  # type: ignore[index]
        self.extra = nn.Parameter(torch.ones(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = super().forward(tokens)
        return scores * (1.0 if self.lacks and tokens[0, 0] % 2 else self.extra.mean())


@on_ranks(2)
def test_messages_that_the_user_sends(rank: int) -> None:
    """Each unit's message goes through the user's objects once, with FSDP2's values and one process's."""
    for dtype, factor, sums in (
        (None, None, False),
        (None, None, True),
        (torch.bfloat16, None, False),
        (None, 4.0, False),
    ):
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=dtype)
        counts: tuple[list[tuple[int, int]], ...] = [], []
        models: list[Any] = [Partly(bool(factor)), Partly(bool(factor))]
        for model, shard in zip(models, (fully_shard, torchs_fully_shard), strict=True):
            if shard is torchs_fully_shard and factor:
                continue  # gloo has no PREMUL_SUM
            shard(model.layers[0], mp_policy=policy)
            shard(model, mp_policy=policy)
        ours, plain = models[0], Partly(bool(factor))
        comms: list[tuple[Gather, Gather]] = []
        for model in models[:1] if factor else models:
            comms.append((Gather(), Scatter()))
            for m in (model.layers[0], model):
                m.set_custom_all_gather(comms[-1][0])
                m.set_custom_reduce_scatter(comms[-1][1])
                m.set_force_sum_reduction_for_comms(sums)
                comms[-1][1].only_sums = sums  # type: ignore[attr-defined]
                if factor:
                    m.set_gradient_divide_factor(factor)
        trained = [*models[: len(comms)], plain]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in trained]
        for step in range(3):
            if step == 2:
                trained[0] = ours = copy.deepcopy(ours)  # goes on as the first would
                optimizers[0] = torch.optim.SGD(ours.parameters(), lr=0.3)
            for m, optimizer in zip(trained, optimizers, strict=True):
                optimizer.zero_grad()
                if m is plain:
                    (torch.stack([loss_of(m, r, step) for r in range(2)]).sum() / (factor or 2.0)).backward()
                else:
                    loss_of(m, rank, step).backward()
                    gather, scatter = comms[trained.index(m)]
                    counts[trained.index(m)].append((gather.calls, scatter.calls))
                optimizer.step()
        tolerance = 2e-2 if dtype else 1e-6
        assert_same(ours, plain, rtol=0, atol=tolerance)
        if not factor:
            assert_same(ours, models[1], rtol=0, atol=tolerance / 10)
        # the root stays gathered, the layer is gathered again; here not, as soon as it is known to come last
        assert counts[0] == [(3, 2), (5, 4), (8, 6)]
        assert counts[1] == ([] if factor else [(3, 2), (6, 4), (9, 6)])


@on_ranks(2)
def test_hooks_behind_reductions(rank: int) -> None:
    """A hook that averages over replicas makes what the mesh of both makes; with replicas it gets their mean."""
    hybrid = meshes()[1]
    replicas = hybrid.get_group("dp_replicate")
    plain, by_hook, native = Partly(), Partly(), Partly()

    def average(gradients: torch.Tensor) -> None:
        dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=replicas)

    def halve(gradients: torch.Tensor) -> None:
        gradients.mul_(0.5)

    for model, mesh, hook in ((by_hook, hybrid["dp_shard"], average), (native, hybrid, halve)):
        for m in (model.layers[0], model):
            fully_shard(m, mesh=mesh)
            aside = torch.cpu.current_stream() if model is by_hook else None  # what there is of streams
            m.set_all_reduce_hook(hook, stream=aside)  # type: ignore[operator]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=rate) for m, rate in ((plain, 0.3), (by_hook, 0.3), (native, 0.6))
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([loss_of(plain, r, step) for r in range(2)]).mean().backward()
        for model in (by_hook, native):
            with sharding_of(model).no_sync():
                (loss_of(model, rank, step) / 4).backward()
            (loss_of(model, rank, step) * 3 / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in (by_hook, native):
        assert_same(model, plain, rtol=0, atol=1e-6)
    with pytest.raises(ConfigurationError, match="not for ranks with replicas"):
        native.set_all_reduce_hook(halve, stream=torch.Stream)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="with messages that others send"):
        pickle.dumps(by_hook)


class Chunked(Net):
    """Hidden values, whose loss is formed a chunk at a time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)

    def train_chunks(self, tokens: torch.Tensor, scale: float = 1.0) -> None:
        hidden = self(tokens)
        inputs = hidden.detach().requires_grad_()
        chunks = inputs.chunk(3)
        for k, (chunk, wanted) in enumerate(zip(chunks, tokens.chunk(3), strict=True)):
            if isinstance(self.output, FSDPModule):
                self.output.set_requires_gradient_sync(k == 2, recurse=False)
            loss = nn.functional.cross_entropy(self.output(chunk).flatten(0, 1), wanted.flatten())
            (loss * scale / 3).backward()
        hidden.backward(inputs.grad)


@on_ranks(2)
def test_units_that_accumulate_by_themselves(rank: int) -> None:
    for together in (True, False):
        model, plain = Chunked(), Chunked()
        if together:
            as_in_torchtitan(model, dtensors=True)
        else:
            for part in (model.words, *model.layers, model.output, model):
                fully_shard(part, dtensors=True)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, plain)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model.set_reshard_after_backward(step == 1)
            if step == 2:  # one unit below the root adds up over micro-batches, the others do not
                model.layers[1].set_requires_gradient_sync(False)
                model.train_chunks(tokens(rank, 7))
                model.layers[1].set_requires_gradient_sync(True)
                for r in range(2):
                    plain.train_chunks(tokens(r, 7), 0.5)
            model.train_chunks(tokens(rank, step))
            for r in range(2):
                plain.train_chunks(tokens(r, step), 0.5)
            for optimizer in optimizers:
                optimizer.step()
        assert_same(model, plain, rtol=0, atol=1e-6)
        model.output.set_requires_gradient_sync(False)
        model.train_chunks(tokens(rank, 0))
        model.output.set_requires_gradient_sync(False)
        loss = model.output(model(tokens(rank, 0))).sum()
        loss.backward()
        with pytest.raises(LifecycleError, match="after a backward inside of no_sync"):
            optimizers[0].step()


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.inner(x.to(self.inner.weight.dtype))

    def encode(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ValueError("in encode")
        return x @ self.inner.weight.T


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor


class Fielded(Typed):
    def forward(self, fields: Fields) -> Fields:  # type: ignore[override]
        return Fields(super().forward(fields.x))


@on_ranks(2)
def test_small_words_of_torchs(rank: int) -> None:
    half = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    model: Any = fully_shard(Typed(), mp_policy=half)
    x = torch.randn(2, 4)
    assert model(x).dtype == torch.bfloat16
    assert model.seen == [torch.float32]
    # inputs and outputs in dataclasses are cast, the program's own object stays what it was
    half = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model, given = fully_shard(Fielded(), mp_policy=half), Fields(x)
    found = model(given)
    assert (model.seen, found.x.dtype, given.x.dtype) == ([torch.bfloat16], torch.float64, torch.float32)
    found.x.sum().backward()
    assert model.inner.weight.grad is not None
    # what is ignored stays whole, and each rank's own
    plain = Typed()
    model = Typed()
    model.load_state_dict(plain.state_dict())
    bias = model.inner.bias
    fully_shard(model, ignored_params={bias}, shard_placement_fn=lambda p: Shard(0))
    assert model.inner.bias is bias
    assert isinstance(model.inner.weight, DTensor)
    (model(x) * (rank + 1)).sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full((4,), 2.0 * (rank + 1)))
    # torch's own register_fsdp_forward_method
    model = fully_shard(copy.deepcopy(plain), reshard_after_forward=True)
    broadcast = [p.detach().clone() for p in whole(model.state_dict()).values()]
    torchs_registration(model, "encode")
    for _ in range(2):
        torch.testing.assert_close(model.encode(x), x @ broadcast[0].T)
        with pytest.raises(ValueError, match="in encode"):
            model.encode(x, True)
        model.reset_iter_state()
        torch.testing.assert_close(model(x), nn.functional.linear(x, *broadcast))
    model.set_reduce_scatter_unused_params(True)  # what no rank used has no gradient, as in one process
    model.encode(x).sum().backward()
    assert model.inner.weight.grad is not None
    assert model.inner.bias.grad is None
    torch.testing.assert_close(
        model.inner.weight.grad.full_tensor(), _mean(x.sum(0).expand(4, 4).contiguous()), rtol=1e-5, atol=1e-5
    )

    # torch's other wrappers of this kind, which look for their state where FSDP2 has its own
    model = fully_shard(checkpoint(copy.deepcopy(plain)), reshard_after_forward=True)
    for m in (model, copy.deepcopy(model)):
        m(x).sum().backward()
        torch.testing.assert_close(m.inner.bias.grad.full_tensor(), torch.full((4,), 2.0))
        assert checkpoint.state(m).enable_hook  # type: ignore[attr-defined]

    # as trainers ask torch's private state: NeMo Automodel's heads and losses, axolotl's tiled layers
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=False)
    inner: Any = fully_shard(copy.deepcopy(plain).inner, mp_policy=policy)
    state = _get_module_fsdp_state(inner)
    assert _get_module_fsdp_state(plain) is None is _get_module_fsdp_state(copy.deepcopy(inner))
    assert inner._get_fsdp_state()._mp_policy == state._mp_policy == policy
    assert model._get_fsdp_state()._mp_policy == MixedPrecisionPolicy()
    inner.set_reshard_after_backward(False)
    assert not state._fsdp_param_group.reshard_after_backward
    for change, error in (("_is_root", ConfigurationError), ("mesh_info", AttributeError)):
        with pytest.raises(error):
            setattr(state, change, None)


class Part(nn.Module):
    """A stage of a pipeline; a layer may be left out of what is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skips = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return x + self.second(torch.tanh(y.detach() if self.skips else y))


# where parts of one rank follow each other
@pytest.mark.skipif(
    torch.__version__[:4] == "2.9.", reason="torch 2.9 sends messages to its own rank: not with gloo"
)
@on_ranks(2)
def test_in_torchs_pipelines(rank: int) -> None:
    """Micro-batches are reduced at the end, halves of backwards too, and where one rank has no gradient of a unit."""
    torch.manual_seed(6)
    plain, data = nn.ModuleList([Part(), Part()]), torch.randn(2, 4, 4)
    alone = [dist.new_group([k]) for k in range(2)][rank]

    halves, words = ScheduleZBVZeroBubble, [{"reshard_after_forward": kept} for kept in (False, True)]
    for kind, said in (
        (ScheduleInterleaved1F1B, words[0]),
        (halves, words[0]),
        (halves, words[1]),
        (halves, {}),
    ):
        parts, truth = cast("Any", copy.deepcopy(plain)), cast("Any", copy.deepcopy(plain))
        for part in parts:
            for m in (part.first, part.second, part):
                fully_shard(m, **said)
        stages = [PipelineStage(p, k, 2, torch.device("cpu"), group=alone) for k, p in enumerate(parts)]
        pipeline = kind(stages, 2, loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False)
        parts[1].skips = rank == 0
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (parts, truth)]
        for _ in range(2):
            pipeline.step(data[rank], target=data[1 - rank])
            for r in range(2):
                truth[1].skips = r == 0
                (truth[1](truth[0](data[r])) - data[1 - r]).square().sum().div(2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(parts, truth, f"{kind.__name__}, {said}")


def _mean(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


@on_ranks(2)
def test_memory_that_stays_after_backward(rank: int) -> None:
    """Memory that stays between backward and forward saves gathers, and never shows old values."""
    model, plain = as_in_torchtitan(Net(), dtensors=True), Net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    heard = gathers_of(model)
    model.set_reshard_after_backward(False)
    for step in range(3):
        for micro in range(2):
            (loss_of(model, rank, 2 * step + micro) / 2).backward()
            (torch.stack([loss_of(plain, r, 2 * step + micro) for r in range(2)]).mean() / 2).backward()
            heard.append("|")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [len(part.split()) for part in " ".join(heard).split("|")] == [9, 4, 9, 4, 9, 4, 0]
    assert_same(model, plain, rtol=0, atol=1e-6)


class Scaled(nn.Module):
    """Has a parameter of its own, and a module inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.scale, self.inside = nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x * self.scale)


@pytest.mark.skipif(not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"), reason="of torch 2.15")
@on_ranks(2)
def test_parameters_computed_with_in_dtypes_of_their_own(rank: int) -> None:
    """torch 2.15's policies choose for each parameter, and reduce in its dtype unless they say another one."""
    low = torch.bfloat16

    class Asked(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append((self.scale.dtype, self.inside.weight.dtype, self.inside.bias.dtype, x.dtype))
            return nn.functional.linear(
                x * self.scale.to(x.dtype), self.inside.weight, self.inside.bias.to(x.dtype)
            )

    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    for reduce in (None, low):
        found: list[tuple[torch.dtype, ...]] = []
        policy: Any = MixedPrecisionPolicy(
            param_dtype=low,
            reduce_dtype=reduce,
            param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None,
        )
        models = [shards(Asked(), mp_policy=policy) for shards in (fully_shard, torchs_fully_shard)]
        for m in models:
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for _ in range(3):
                m(x[rank]).square().mean().backward()
                optimizer.step()
        copy.deepcopy(models[0])(x[rank])
        pickle.dumps(fully_shard(Scaled(), mp_policy=policy))
        assert set(found) == {(torch.float32, low, torch.float32, low)}
        for p, q in zip(*[m.parameters() for m in models], strict=True):
            torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0, atol=0)  # type: ignore[attr-defined]
            torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=0, atol=0)  # type: ignore[union-attr]
    wrong: Any = MixedPrecisionPolicy(param_dtype=low, param_dtype_override_fn=lambda p: torch.float16)
    with pytest.raises(ValueError, match=r"torch.float16 for a parameter with dtype torch.float32"):
        fully_shard(Scaled(), mp_policy=wrong)
    by_rank: Any = MixedPrecisionPolicy(
        param_dtype=low, param_dtype_override_fn=lambda p: p.dtype if rank else None
    )
    with pytest.raises(RankMismatchError, match="computed with as it is"):
        fully_shard(Scaled(), mp_policy=by_rank)


class Offset(nn.Module):
    """Has parameters of its own, and modules inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.scale, self.shift = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(5))
        self.inside = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x * self.scale + self.shift)  # type: ignore[no-any-return]


@pytest.mark.skipif(not hasattr(common, "ShardPlacementResult"), reason="of torch 2.12")
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@on_ranks(4)
def test_own_parameters_on_another_mesh(rank: int, tmp_path: Path, low: torch.dtype | None) -> None:
    """A module's own parameters take the mesh that they are put on, and those inside the call's, as in torch."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    info: Any = common.HSDPMeshInfo(hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(p: nn.Parameter) -> Any:
        own = common.ShardPlacementResult(placement=None, mesh_info=info)
        return own if p.shape == (5,) else Shard(1) if p.shape == (6, 4) else None

    truth: Any = Offset()
    models: list[Any] = [Offset(), Offset(), Offset()]
    policy = MixedPrecisionPolicy(low, torch.float32, torch.float32)
    for shard, model in zip((fully_shard, fully_shard, torchs_fully_shard), models, strict=True):
        shard(model, mesh=flat, shard_placement_fn=place, mp_policy=policy)
        assert [p.device_mesh for p in model.parameters()] == [hybrid, hybrid, flat, flat, flat, flat]
        model.set_force_sum_reduction_for_comms(True)  # gloo has nothing else for torch's
        model.set_gradient_divide_factor(2.0)
    mine, again, theirs = models
    x = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))

    def train(model: Any, parts: Any, double: float = 1.0) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            for micro in range(2):
                if model is not truth:
                    model.set_requires_gradient_sync(micro == 1)
                (double * model(x[micro, parts]).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(dict(model.named_parameters()))

    wanted = train(truth, slice(None), 2.0)
    close = {"rtol": 0.02, "atol": 0.02} if low else {"rtol": 1e-5, "atol": 1e-6}
    for model in (mine, theirs):
        torch.testing.assert_close(train(model, rank), wanted, **close)  # type: ignore[arg-type]
    dcp.save({"m": mine.state_dict()}, checkpoint_id=tmp_path)
    state = {"m": again.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    again.load_state_dict(state["m"])
    torch.testing.assert_close(train(again, rank), train(mine, rank), rtol=0, atol=0)
