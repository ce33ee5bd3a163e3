"""Experts that are cut over ranks of their own beside dense layers, in torchtitan's and NeMo Automodel's manner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed import fsdp  # where install() may replace it: a module that keeps it would be refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardkit.errors import ConfigurationError
from shardkit.torch_fsdp2 import fully_shard

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
except ImportError:  # before torch 2.12
    FSDPMeshInfo = ShardPlacementResult = None  # type: ignore[assignment, misc]
from tests.beside import whole
from tests.pools import on_ranks

EXPERTS, WIDTH, HIDDEN, MICRO = 4, 6, 8, 2


class Experts(nn.Module):
    """Each rank of ``ranks`` has some of them, and computes these for the tokens of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.ranks: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        if self.ranks is not None:
            assert isinstance(up, DTensor)
            assert isinstance(down, DTensor)
            up, down = up.to_local(), down.to_local()  # type: ignore[assignment]
            group = self.ranks.get_group()
            before, behind = group.rank() * len(x), (group.size() - group.rank() - 1) * len(x)
            mine = slice(before, before + len(x))
            x, gates = (
                collectives.all_reduce(nn.functional.pad(t, (0, 0, before, behind)), group=group)
                for t in (x, gates)
            )
            first = self.ranks.get_local_rank() * len(up)
            gates = gates[:, first : first + len(up)]
        hidden = torch.tanh(torch.einsum("th,ehk->etk", x, up))
        each = torch.einsum("etk,ekh->teh", hidden, down)
        y = (each * gates[..., None]).sum(1)
        return y if self.ranks is None else collectives.all_reduce(y, group=group)[mine]


_seen = set[str]()


def _keeping() -> Any:
    """Recomputes all; gathers are no part of it, which the contexts count in forward and in backward."""
    return create_selective_checkpoint_contexts(lambda _, op, *__, **___: _seen.add(op.name()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.recomputes = Experts(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=_keeping)  # type: ignore[no-any-return]
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.experts(y, self.gate(y).softmax(-1))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(2)]), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _parallel(model: Net, world: DeviceMesh, shard: Callable[..., Any], apart: bool) -> Any:
    """As a strategy that is registered for a model: it gets the model and the mesh, and returns it sharded.

    Args:
        apart: experts are sharded by a call of their own; else that of the block says where they lie.
    """
    data: Any = world["edp", "ep"]._flatten("dp")
    for block in model.blocks:
        experts: Any = block.experts
        experts.ranks = world["ep"]
        for name, p in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(p.detach(), world["ep"], [Shard(0)])))
        if apart:
            shard(experts, mesh=world["edp"], shard_placement_fn=lambda p: Shard(1))
            experts.set_gradient_divide_factor(data.size())
            shard(block, mesh=data)
        else:
            there = ShardPlacementResult(Shard(1), FSDPMeshInfo(world["edp"], shard_mesh_dim=0))
            mine = dict.fromkeys(experts.parameters(), there)
            shard(block, mesh=data, shard_placement_fn=mine.get)
            block.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            block.set_gradient_divide_factor(data.size())  # type: ignore[operator]
            with pytest.raises(ValueError, match=r"on another mesh|multiple param groups"):
                block.set_all_reduce_hook(print)  # type: ignore[operator]
    return shard(model, mesh=data)


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Fused, of parameters on one mesh each: experts' and the others."""
    of_experts = [p for n, p in model.named_parameters() if "experts" in n]
    others = [p for n, p in model.named_parameters() if "experts" not in n]
    return [torch.optim.AdamW(params, lr=0.05, fused=True) for params in (of_experts, others)]


def _batch(step: int, part: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(5, WIDTH, generator=draw, dtype=torch.float64)


def _train(model: Any, parts: Iterable[int], count: int) -> list[float]:
    """Micro-batches whose gradients travel with the last; one norm over both meshes, as torchtitan takes it."""
    optimizers, norms = _optimizers(model), []
    for step in range(3):
        for micro in range(MICRO):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == MICRO - 1)
                model.set_is_last_backward(micro == MICRO - 1)
            for part in parts:
                (model(_batch(10 * step + micro, part)).square().mean() / MICRO / count).backward()
        squares = []
        for optimizer in optimizers:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norm = nn.utils.get_total_norm(grads)
            squares.append(whole({"norm": norm})["norm"] ** 2)
        norms.append(float(sum(squares)) ** 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


@on_ranks(4)
def test_experts_beside_fsdp2_and_one_process(rank: int) -> None:
    world, one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), Net()
    truth = _train(one, range(4), 4)
    has_meshes = ShardPlacementResult is not None
    ways = [
        (fully_shard, True),
        (fsdp.fully_shard, not has_meshes),
        *([(fully_shard, False)] if has_meshes else []),
    ]
    for shard, apart in ways:
        model = _parallel(Net(), world, shard, apart)
        for block in model.blocks:
            block.recomputes = shard is fully_shard
        torch.testing.assert_close(_train(model, [rank], 1), truth, rtol=1e-6, atol=1e-8)
        assert {name for name in _seen if "c10d" in name} <= {"c10d::allreduce_"}
        torch.testing.assert_close(whole(dict(model.named_parameters())), dict(one.named_parameters()))
    if has_meshes:  # a module's own parameters are over one mesh
        there = ShardPlacementResult(Shard(1), FSDPMeshInfo(world["edp"], shard_mesh_dim=0))
        experts = Experts()
        with pytest.raises(ConfigurationError, match="in modules of their own"):
            fully_shard(experts, mesh=world["ep"], shard_placement_fn={experts.up: there}.get)
