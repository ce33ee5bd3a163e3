"""``fully_shard`` over parameters that torch's tensor parallelism has cut, beside FSDP2 and one process."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import shardkit
from shardkit import PrecisionPolicy, fully_shard, sharding_of
from shardkit.errors import ConfigurationError, LifecycleError
from tests.beside import SGD, train_parts, whole
from tests.pools import on_ranks

try:
    from torch.distributed.fsdp import DataParallelMeshDims as Dims
except ImportError:  # before torch 2.12
    Dims = None  # type: ignore[assignment, misc]

UNEVEN = not issubclass(_StridedShard, Shard)  # this torch puts such parts together as they were


class Block(nn.Module):
    """A norm over parts of the sequence, a colwise and a rowwise layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, and a head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(hidden), Block(hidden))
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def _split(model: Net, tp: DeviceMesh, head: bool = True) -> Net:
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
        parallelize_module(block, tp, {"": whole, **plan})
    if head:
        parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def _sharded(hidden: int, mesh: DeviceMesh, by: Any, head: bool = True, **options: Any) -> Net:
    model = _split(Net(hidden), mesh["tp"], head)
    names: Any = tuple(n for n in mesh.mesh_dim_names or () if n != "tp")
    options |= {"dtensors": True} if by is fully_shard else {}
    for part in (*model.blocks, model):
        by(part, mesh=mesh[names if len(names) > 1 else names[0]], **options)
    return model


CUTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def _on_whole_mesh(hidden: int, mesh: DeviceMesh, by: Any) -> Net:
    """All are DTensors over all of the mesh, inputs and outputs too; sums over data are right as they are."""
    model, rest = Net(hidden), [Replicate()] * (mesh.ndim - 1)
    for name, p in list(model.named_parameters()):
        where, _, leaf = name.rpartition(".")
        cut = next((cut for end, cut in CUTS.items() if name.endswith(end)), Replicate())
        over = nn.Parameter(distribute_tensor(p.detach(), mesh, [*rest, cut]))
        setattr(model.get_submodule(where), leaf, over)
    for part in (*model.blocks, model):
        by(part, mesh=mesh, dp_mesh_dims=Dims("dp", "hsdp" if mesh.ndim > 2 else None))
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    data = [Shard(0)] * (mesh.ndim - 1)
    over_all = lambda _, args: DTensor.from_local(args[0].flatten(0, 1), mesh, [*data, Replicate()])  # noqa: E731
    model.register_forward_pre_hook(over_all)
    return model


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh(
        "cpu", sizes, mesh_dim_names=("dp", "tp") if len(sizes) == 2 else ("hsdp", "dp", "tp")
    )


def _batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)


def _alone(hidden: int, parts: int, steps: range) -> tuple[Net, Any, list[float]]:
    model = Net(hidden)
    optimizer = _adam(model)
    return model, optimizer, train_parts(model, optimizer, range(parts), _batch, steps)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)


def _same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(whole(dict(found)), whole(dict(wanted)), rtol=1e-4, atol=1e-6)


def _beside(rank: int, mesh: DeviceMesh, hidden: int, sharded: Any = _sharded, **options: Any) -> Net:
    """Trains in both libraries; the parts, their gradients and norms are FSDP2's, and the whole that of one process."""
    parts, part = mesh.size() // mesh["tp"].size(), rank // mesh["tp"].size()
    ours, theirs = (sharded(hidden, mesh, by, **options) for by in (fully_shard, fsdp2))
    norms = [train_parts(m, _adam(m), [part], _batch, range(3)) for m in (ours, theirs)]
    one, _, wanted = _alone(hidden, parts, range(3))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] == pytest.approx(wanted, rel=1e-5)
    other: Any = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        q = other[name]
        assert isinstance(p, DTensor), name
        assert isinstance(p.grad, DTensor), name
        assert p.placements == q.placements == p.grad.placements, name
        assert (p.device_mesh, p.shape) == (q.device_mesh, q.shape), name
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=1e-4, atol=1e-6)
    _same(ours.named_parameters(), one.named_parameters())
    _same(ours.state_dict(), one.state_dict())
    ours.load_state_dict({k: v + 1 for k, v in one.state_dict().items()})  # plain tensors
    _same(ours.state_dict(), {k: v + 1 for k, v in one.state_dict().items()})
    return ours


@on_ranks(4)
def test_training_beside_fsdp2_and_one_process(rank: int) -> None:
    mesh = _mesh(2, 2)
    _beside(rank, mesh, 8, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    model = _beside(rank, mesh, 8)
    with sharding_of(model).summon_full_params(writeback=True):
        weight: Any = model.blocks[0].up.weight
        assert (weight.placements, weight.device_mesh) == ((Shard(0),), mesh["tp"])
        weight.detach().fill_(2)
    with pytest.raises(LifecycleError, match=r"blocks\.0\.up\.weight"):
        weight + 1  # a DTensor that has no values now
    assert (whole(model.state_dict())["blocks.0.up.weight"] == 2).all()
    if Dims is not None:
        _beside(rank, mesh, 8, _on_whole_mesh)
    for shape, hidden in (((2, 2), 10), ((1, 2, 2), 2)):  # rows of 5 in two, and 1 in two
        if UNEVEN:
            _beside(rank, _mesh(*shape), hidden)
        else:
            with pytest.raises(ConfigurationError, match=f"a DTensor of {hidden} rows with"):
                _sharded(hidden, _mesh(*shape), fully_shard)


@on_ranks(4)
def test_any_norm_over_both_dimensions(rank: int) -> None:
    """Of 4 x 1 ranks the last one has no rows of some parameters, where torch's own FSDP2 raises on it, and waits."""
    for sizes in ((2, 2), (4, 1)):
        mesh = _mesh(*sizes)
        model, one, parts = _sharded(8, mesh, fully_shard), Net(8), sizes[0]
        grads = list(model.parameters())
        for order, foreach in [(n, f) for n in (2.0, 1.0, math.inf) for f in (True, False, None)]:
            for m, mine in ((model, [rank // sizes[1]]), (one, range(parts))):
                m.zero_grad()
                for part in mine:
                    (m(_batch(0, part)).square().mean() / len(mine)).backward()
            truth = nn.utils.clip_grad_norm_(one.parameters(), 0.05, order)
            if foreach is None:
                norm = sharding_of(model).clip_grad_norm_(0.05, order)
            elif order == 1:  # in two steps, as verl does it
                norm = nn.utils.get_total_norm(
                    [p.grad for p in grads if p.grad is not None], order, foreach=foreach
                )
                nn.utils.clip_grads_with_norm_(grads, 0.05, norm, foreach)
            else:
                norm = nn.utils.clip_grad_norm_(grads, 0.05, order, foreach=foreach)
            torch.testing.assert_close(whole({"norm": norm})["norm"], truth)
            for p, q in zip(grads, one.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
        copied = copy.deepcopy(grads[0].grad)
        torch.testing.assert_close(copied.full_tensor(), grads[0].grad.full_tensor())  # type: ignore[union-attr]
        if rank == 0:
            grads[2].grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="is non-finite"):
            nn.utils.clip_grad_norm_(grads, 0.05, error_if_nonfinite=True)


@on_ranks(4)
def test_checkpoints_between_shapes_of_meshes(rank: int, tmp_path: Path) -> None:
    """Saved from one shape of mesh and loaded into others, by both libraries, with the optimizer's state."""

    def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    hidden = 10 if UNEVEN else 8
    shapes = [((2, 2), fully_shard), ((4, 1), fully_shard), ((2, 2), fsdp2), ((2, 1, 2), fully_shard)]
    for step, (sizes, by) in enumerate(shapes):
        mesh = _mesh(*sizes)
        model = _sharded(hidden, mesh, by)
        optimizer = _adam(model)
        if step:
            into = state_of(model, optimizer)
            dcp.load(into, checkpoint_id=f"{tmp_path}/{step - 1}")
            set_state_dict(
                model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
            )
        clip = sharding_of(model).clip_grad_norm_ if by is fully_shard else None
        train_parts(model, optimizer, [mesh.get_local_rank(0) % 2], _batch, range(step, step + 1), clip)
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{tmp_path}/{step}")
    one, alone, _ = _alone(hidden, 2, range(4))
    _same(model.state_dict(), one.state_dict())
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    _same(moments, {n: alone.state[p]["exp_avg"] for n, p in one.named_parameters()})


def _keep(layer: Any, *_: object) -> None:
    layer.kept = layer.weight.t()


def _in_other_ways(rank: int) -> None:
    """Dtypes, gradients that add up, frozen parameters; then what comes from the meta device, in part uncut."""
    mesh, part = _mesh(2, 2), rank // 2
    model, one, seen = _split(Net(8), mesh["tp"]), Net(8), []
    model.blocks[0].up.requires_grad_(False)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp"], dtensors=True, precision=PrecisionPolicy(compute=torch.bfloat16))
    model.head.register_forward_pre_hook(
        lambda m, _: seen.append({m.weight.dtype, m.weight.to_local().dtype})
    )
    with sharding_of(model).no_sync():
        model(_batch(0, part)).sum().backward()
    model(_batch(1, part)).sum().backward()
    assert seen == [{torch.bfloat16}] * 2
    for step in range(4):
        (one(_batch(step // 2, step % 2)).sum() / 2).backward()
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        if name.startswith("blocks.0.up"):
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=0.1)
    model.blocks[0].up.register_forward_hook(_keep)
    model(_batch(0, part)).sum().backward()
    with pytest.raises(LifecycleError, match=r"a view of parameter 'blocks\.0\.up\.weight'"):
        model.blocks[0].up.kept + 1

    with torch.device("meta"):
        model = _split(Net(8), mesh["tp"], head=False)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp"], dtensors=True)
    model.to_empty(device="cpu")
    model.load_state_dict(Net(8).state_dict())
    clip = sharding_of(model).clip_grad_norm_  # torch's own takes DTensors of one mesh
    norms = train_parts(model, SGD(model.parameters()), [part], _batch, range(2), clip)
    one = Net(8)
    truth = train_parts(one, SGD(one.parameters()), range(2), _batch, range(2))
    assert norms == pytest.approx(truth, rel=1e-5)
    _same(model.named_parameters(), one.named_parameters())


def _refused(rank: int) -> None:
    mesh = _mesh(2, 2)
    with pytest.raises(ConfigurationError, match="is a DTensor"):
        fully_shard(_split(Net(8), mesh["tp"]), mesh=mesh["dp"], dtensors=False)
    for wrong in (None, init_device_mesh("cpu", (4,)), mesh["tp"]):
        with pytest.raises(ConfigurationError, match="have to be named dimensions of one mesh"):
            fully_shard(_split(Net(8), mesh["tp"]), mesh=wrong, dtensors=True)
    sums = nn.Linear(2, 2)
    sums.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Partial()]))
    with pytest.raises(ConfigurationError, match=r"'weight' is a DTensor of 2 rows with .*Partial"):
        fully_shard(sums, mesh=mesh["dp"], dtensors=True)
    fixed = shardkit.ReducePolicy(order="fixed")
    with pytest.raises(ConfigurationError, match="parameters that tensor parallelism has cut"):
        fully_shard(_split(Net(8), mesh["tp"]), mesh=mesh["dp"], dtensors=True, reduce=fixed)
    model = fully_shard(_split(Net(8), mesh["tp"]), mesh=mesh["dp"], dtensors=True)
    for refused in (
        lambda: copy.deepcopy(model),
        lambda: shardkit.save_training(tempfile.mkdtemp(), step=0, model=model),
        lambda: shardkit.WholeParameters(model, torch.optim.AdamW, lr=0.1),
        lambda: shardkit.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1)),
        sharding_of(model).sharded_state_dict,
    ):
        with pytest.raises(ConfigurationError, match="by tensor parallelism"):
            refused()


@on_ranks(4)
def test_other_ways_and_what_is_refused(rank: int) -> None:
    _in_other_ways(rank)
    _refused(rank)
