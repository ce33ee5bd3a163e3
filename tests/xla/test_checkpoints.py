"""Checkpoints of shardkit.xla.fsdp and of torch_xla's own FSDP, in the same replicas: both ways, all layouts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.checkpoint.tools import Conversion, convert, open_checkpoint
from tests.pools import rank_pool
from tests.xla.models import batch, build

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

LAYOUTS: dict[str, dict[str, Any]] = {
    "parameter": {},
    "flat": {"flatten_parameters": True},
    "rows": {"shard_param_on_dim_0": True},
    "half": {"flatten_parameters": True, "compute_dtype": torch.bfloat16},
}


def _wrapped(
    wrap: Callable[..., nn.Module], model: nn.Module, nested: bool, options: dict[str, Any]
) -> nn.Module:
    if nested:
        model.second = wrap(model.second, **options)
        model.first = wrap(model.first, **options)
    return wrap(model, **options)


def _both(nested: bool, options: dict[str, Any], seed: int = 0, **kind: bool) -> tuple[Any, Any]:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

    from shardkit.xla.fsdp import XlaFullyShardedDataParallel as Ours

    theirs = _wrapped(Theirs, build(seed, **kind), nested, {**options, "pin_layout_in_collective_ops": False})
    return theirs, _wrapped(Ours, build(seed, **kind), nested, options)


def _train(model: Any, rank: int, steps: range, optimizer: Any) -> None:
    import torch_xla

    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step).to("xla")).float().square().mean().backward()
        optimizer.step()
        torch_xla.sync()


def _through_a_file(state: Any) -> Any:
    import torch_xla.core.xla_model as xm

    file = io.BytesIO()
    xm.save(state, file, master_only=False)
    file.seek(0)
    return torch.load(file)


def _assert_same(a: Any, b: Any, tolerance: float) -> None:
    assert list(a) == list(b)
    for key in a:
        assert a[key].shape == b[key].shape, key
        assert a[key].dtype == b[key].dtype, key
        torch.testing.assert_close(a[key].cpu(), b[key].cpu(), rtol=tolerance, atol=tolerance)


def _cross_load(rank: int, nested: bool, options: dict[str, Any], kind: dict[str, bool]) -> None:
    half = "compute_dtype" in options
    tolerance = 3e-3 if half else 2e-6
    theirs, ours = _both(nested, options, **kind)
    adam = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (theirs, ours)]
    assert [p.shape.numel() for p in theirs.parameters()] == [p.shape.numel() for p in ours.parameters()]
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    for model, optimizer in zip((theirs, ours), adam, strict=True):
        _train(model, rank, range(2), optimizer)
    _assert_same(theirs.state_dict(), ours.state_dict(), tolerance)
    info_a, info_b = theirs.get_shard_metadata(), ours.get_shard_metadata()
    for ours_alone in ("shared_info", "run_id", "backwards"):
        info_b.pop(ours_alone, None)
    if half:  # torch_xla names buffers as its state dict does not, and forgets those that came from the CPU
        known = {k.replace("_fpw_module.", "") for k in info_a.pop("buffer_info")}
        assert known <= set(info_b.pop("buffer_info"))
    assert info_a == info_b
    # each one's checkpoint into a fresh model of the other, and on from there
    saved = [
        _through_a_file({"m": m.state_dict(), "o": o.state_dict()})
        for m, o in zip((theirs, ours), adam, strict=True)
    ]
    theirs, ours = _both(nested, options, seed=1, **kind)
    rows = bool(options.get("shard_param_on_dim_0"))
    for model, state in ((theirs, saved[1]), (ours, saved[0])):
        result = model.load_state_dict(state["m"])
        assert not result.missing_keys
        assert not result.unexpected_keys
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if not rows:  # there, moments are matrices in torch_xla
            optimizer.load_state_dict(copy.deepcopy(state["o"]))
        _train(model, rank, range(2, 4), optimizer)
    _assert_same(theirs.state_dict(), ours.state_dict(), tolerance)


@pytest.mark.parametrize(("world_size", "layout"), [*((2, k) for k in LAYOUTS), (4, "flat")])
def test_checkpoints_load_both_ways(world_size: int, layout: str) -> None:
    rank_pool(world_size, "xla").run(_cross_load, True, LAYOUTS[layout], {})


@pytest.mark.parametrize("layout", ["parameter", "flat"])
def test_checkpoints_of_one_unit_with_frozen_weights(layout: str) -> None:
    rank_pool(2, "xla").run(_cross_load, False, LAYOUTS[layout], {"frozen": True})


# ------------ ``shardkit ckpt convert --to xla``: torch_xla reads it, and what torch_xla wrote is read.


def _build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def _both_ways(rank: int, world_size: int, folder: str) -> Any:
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

    state = torch.load(f"{folder}/ranks/rank-{rank:08d}-of-{world_size:08d}.pth")
    device = xm.xla_device()
    model = Theirs(_build().to(device))
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in state["model"].items()
    }
    metadata = model.get_shard_metadata()
    assert metadata == state["shard_metadata"]
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), state["model"][name]), name
    nested = Theirs(
        nn.Sequential(Theirs(_build().to(device), flatten_parameters=True), nn.Linear(3, 2)).to(device)
    )
    saved = {"model": nested.state_dict(), "shard_metadata": nested.get_shard_metadata()}
    xm.save(saved, f"{folder}/flat-{rank}.pth", master_only=False)
    return None


def test_both_ways(tmp_path: Path) -> None:
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    full = {k: v + 1 for k, v in _build().state_dict().items()}
    torch.save(full, tmp_path / "full")
    convert(str(tmp_path / "full"), str(tmp_path / "ranks"), Conversion("xla", 2))
    found, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/ranks/rank", save_model=False)
    assert set(found) == set(full)
    assert all(torch.equal(found[k], full[k]) for k in full)
    rank_pool(2, "xla").run(_both_ways, 2, str(tmp_path))
    expected, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/flat", save_model=False)
    read = {k: v.read() for k, v in open_checkpoint(f"{tmp_path}/flat*.pth").model.items()}
    assert set(read) == set(expected)
    assert all(torch.equal(read[k], expected[k]) for k in expected)
