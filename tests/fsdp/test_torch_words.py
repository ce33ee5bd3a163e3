"""fully_shard with the arguments and methods of torch's (FSDP2), and device meshes in place of groups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchsOffloadPolicy

from shardkit import FSDP, OSS, ShardedDDP, ShardedGradScaler, fully_shard, register_fsdp_forward_method
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.policy import PrecisionPolicy, ReshardPolicy
from tests.pools import rank_pool


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


def _train(rank: int) -> None:
    flat, hybrid = meshes()
    kept = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    cases: list[dict[str, Any]] = [
        {"mesh": flat, "mp_policy": kept, "offload_policy": TorchsOffloadPolicy()},
        {"mesh": hybrid, "offload_policy": CPUOffloadPolicy()},
        {"mesh": flat, "factor": 4.0},
    ]
    for options in cases:
        factor = options.pop("factor", 2.0)
        model, plain = as_in_torchtitan(Net(), **options), Net()
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
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-7)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_a_script_for_torchs_changes_one_import() -> None:
    rank_pool(2).run(_train)


def _values(rank: int) -> None:
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
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (whole, plain)]
    for step in range(2):
        x = tokens(0, step)
        results = [m.scores(x) for m in (whole, plain)]
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
        for result, optimizer in zip(results, optimizers, strict=True):
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    half = fully_shard(
        Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    )
    assert half(tokens(rank, 0)).dtype == torch.float32
    assert loss_of(half, rank, 0).item() != loss_of(plain, rank, 0).item()


def test_values_between_steps() -> None:
    rank_pool(2).run(_values)


class Twice(Net):
    """Its forward calls the module itself, and uses its own parameters after that."""

    def forward(self, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
        inner = self(tokens, 0) if depth else super().forward(tokens)
        return inner + self.output.bias * self.norm.weight.sum()


def _own_calls(rank: int) -> None:
    model, plain = as_in_torchtitan(Twice()), Twice()
    whole = fully_shard(Twice())
    for m in (model, whole):
        with torch.no_grad():
            torch.testing.assert_close(whole(tokens(rank, 0)), plain(tokens(rank, 0)), rtol=0, atol=1e-6)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        truth = copy.deepcopy(plain)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(m, rank, step).backward()
            optimizer.step()
            truth.zero_grad()
            torch.stack([loss_of(truth, r, step) for r in range(2)]).mean().backward()
            torch.optim.SGD(truth.parameters(), lr=0.1).step()
        torch.testing.assert_close(m.state_dict(), truth.state_dict(), rtol=0, atol=1e-6)
    with pytest.raises(IndexError):
        whole(torch.full((1, 1), 99))
    torch.testing.assert_close(
        whole(tokens(rank, 0)), truth(tokens(rank, 0)), rtol=0, atol=1e-6
    )  # an error leaves nothing behind


def test_a_forward_that_calls_its_own_module() -> None:
    rank_pool(2).run(_own_calls)


def _stages_1_and_2(rank: int) -> None:
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
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
        wrapper = FSDP(Net(), mesh=mesh)
        assert sum(p.numel() for p in wrapper.parameters()) <= 1 + sum(
            p.numel() for p in plain.parameters()
        ) / (mesh.size(mesh.ndim - 1))


def test_meshes_wherever_a_group_is_taken() -> None:
    rank_pool(2).run(_stages_1_and_2)


# ------------------------------------------------------------------------------------ torch.distributed.checkpoint
def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)


def _steps(model: Net, optimizer: torch.optim.Optimizer, ranks: list[int], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.stack([loss_of(model, r, step) for r in ranks]).mean().backward()
        optimizer.step()


def _checkpoints(rank: int, folder: str) -> None:
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
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
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
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(
                again, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
            )
        else:
            set_model_state_dict(again, whole[0])
            mine = {} if given.get("broadcast_from_rank0") and rank else copy.deepcopy(whole[1])
            set_optimizer_state_dict(again, optimizer, mine, options=StateDictOptions(**given))  # type: ignore[arg-type]
        _steps(again, optimizer, [rank], range(2, 4))
        torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_torchs_functions_for_state(tmp_path: Path) -> None:
    rank_pool(2).run(_checkpoints, str(tmp_path))


def _refused(rank: int) -> None:
    flat, _ = meshes()
    deep = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mesh": flat, "group": dist.group.WORLD}, "both mesh and a group"),
        ({"mesh": dist.group.WORLD}, "pass a torch.distributed.device_mesh"),
        ({"mesh": deep}, "3 dimensions"),
        (
            {"reshard_after_forward": True, "reshard": ReshardPolicy()},
            "both reshard_after_forward and reshard",
        ),
        (
            {"mp_policy": MixedPrecisionPolicy(), "precision": PrecisionPolicy()},
            "both mp_policy and precision",
        ),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)},
            "cast_forward_inputs",
        ),
        ({"shard_placement_fn": lambda p: None}, "shard_placement_fn"),
        ({"ignored_params": {Net().words.weight}}, "ignored_params"),
    ]
    for options, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            fully_shard(Net(), **options)
    with pytest.raises(TypeError, match="reshard_after"):
        fully_shard(Net(), reshard_after=True)  # type: ignore[call-arg]
    model: Any = as_in_torchtitan(Net())
    with pytest.raises(ConfigurationError, match="set_all_reduce_hook"):
        model.set_all_reduce_hook(print)
    with pytest.raises(ConfigurationError, match="reduces its gradients by its end"):
        model.set_manual_backward_finalization(True)
    with pytest.raises(ConfigurationError, match="memory of gathered parameters"):
        model.set_keep_unsharded_storage(recurse=False, keep=True)
    model.set_manual_backward_finalization(False)
    model.set_keep_unsharded_storage(False)
    assert model.finalize_backward() is None
    assert model.finalize_backward(async_op=True).wait() is None
    with pytest.raises(ConfigurationError, match="recurse"):
        model.set_requires_gradient_sync(False, recurse=False)
    with pytest.raises(LifecycleError, match="outermost"):
        model.norm.set_requires_gradient_sync(False)
    with pytest.raises(ConfigurationError, match="no method 'nothing'"):
        register_fsdp_forward_method(model, "nothing")


def test_what_has_no_counterpart_is_refused() -> None:
    rank_pool(2).run(_refused)


def test_all_methods_of_torchs_are_there() -> None:
    """Those of this torch that its users call."""
    from torch.distributed.fsdp import FSDPModule

    rank_pool(1).run(_has, [n for n in vars(FSDPModule) if not n.startswith("_")])


def _has(rank: int, names: list[str]) -> None:
    model = fully_shard(nn.Linear(2, 2))
    assert [n for n in names if not hasattr(model, n)] == []
