"""Checkpoints of ``torch.distributed.checkpoint`` written from flat shards: boxes, and who reads what whom wrote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from shardkit import FSDP, fully_shard, hybrid_groups, sharding_of
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.layout import Align, boxes_of
from tests.doors import through
from tests.pools import on_ranks, rank_pool
from tests.training_checkpoints import programs


def test_boxes_are_the_run() -> None:
    for shape in [(), (5,), (3, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]:
        numel = math.prod(shape)
        whole = torch.arange(numel).view(shape)
        for first, end in itertools.combinations(range(numel + 1), 2):
            boxes = boxes_of(shape, first, end - first)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            found, start = [], 0
            for box in boxes:
                assert box.start == start
                part = whole
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                found += part.flatten().tolist()
                start += math.prod(box.sizes)
            assert found == list(range(first, end)), (shape, first, end)
    assert boxes_of((3, 4), 5, 0) == []


class Model(programs.Model):
    """With a scalar."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.rand(()))


def by_wrappers(model: Model, **options: Any) -> nn.Module:
    return through("FSDP", model, "inner", **options)  # type: ignore[no-any-return]


def in_place(model: Model, **options: Any) -> nn.Module:
    fully_shard(model.inner, **options)
    return fully_shard(model, **options)


Wrap = Callable[..., nn.Module]


def _state(model: nn.Module) -> dict[str, Any]:
    return {"model": sharding_of(model).sharded_state_dict()}


def _write(rank: int, folder: str, wrap: Wrap, align: Align, replicated: bool) -> None:
    options: dict[str, Any] = {"align": align}
    if replicated:
        options["group"], options["replicas"] = hybrid_groups(2)
    dcp.save(_state(wrap(Model(), **options)), checkpoint_id=folder)


def _read(rank: int, folder: str, wrap: Wrap, align: Align) -> None:
    model = wrap(Model(seed=1), align=align)
    before = [p.data_ptr() for p in model.parameters()]
    dcp.load(_state(model), checkpoint_id=folder)
    assert [p.data_ptr() for p in model.parameters()] == before
    torch.testing.assert_close(dict(model.state_dict()), dict(Model().state_dict()), rtol=0, atol=0)


def _read_by_fsdp2(rank: int, ranks: int, folder: str) -> None:
    model = Model(seed=1)
    model.scale = nn.Parameter(torch.zeros(1))  # FSDP2 takes no scalars
    fsdp2(model, mesh=init_device_mesh("cpu", (ranks,)))
    state = {k: v for k, v in get_model_state_dict(model).items() if k != "scale"}
    dcp.load({"model": state}, checkpoint_id=folder)
    wanted = Model().state_dict()
    for key, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, wanted[key], rtol=0, atol=0)


def _write_by_fsdp2(rank: int, ranks: int, folder: str) -> None:
    model = Model()
    scale = model.scale.detach()
    del model.scale
    fsdp2(model, mesh=init_device_mesh("cpu", (ranks,)))
    dcp.save({"model": {**get_model_state_dict(model), "scale": scale}}, checkpoint_id=folder)
    set_model_state_dict(model, get_model_state_dict(model))


@pytest.mark.parametrize(
    ("wrap", "align"),
    [(by_wrappers, None), (by_wrappers, "parameters"), (in_place, "rows")],
)
def test_any_number_of_ranks_reads_what_three_wrote(wrap: Wrap, align: Align, tmp_path: Path) -> None:
    rank_pool(3).run(_write, str(tmp_path), wrap, align, False)
    rank_pool(2).run(_read, str(tmp_path), in_place if wrap is by_wrappers else by_wrappers, None)
    rank_pool(2).run(_read_by_fsdp2, 2, str(tmp_path))
    alone = dict(Model(seed=1).state_dict())
    dcp.load({"model": alone}, checkpoint_id=str(tmp_path), no_dist=True)
    torch.testing.assert_close(alone, dict(Model().state_dict()), rtol=0, atol=0)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    torch.testing.assert_close(whole, dict(Model().state_dict()), rtol=0, atol=0)


def test_what_fsdp2_and_replicas_wrote(tmp_path: Path) -> None:
    rank_pool(2).run(_write_by_fsdp2, 2, str(tmp_path / "fsdp2"))
    rank_pool(4).run(_write, str(tmp_path / "replicas"), by_wrappers, None, True)
    for folder, wrap in (("fsdp2", in_place), ("replicas", by_wrappers)):
        rank_pool(3).run(_read, str(tmp_path / folder), wrap, None)


@on_ranks(2)
def test_pieces_have_no_values_of_their_own(rank: int) -> None:
    model = by_wrappers(Model())
    pieces = sharding_of(model).sharded_state_dict()
    assert set(pieces) == set(Model().state_dict())
    assert {k: v.shape for k, v in pieces.items()} == {k: v.shape for k, v in Model().state_dict().items()}
    assert "elements on this rank" in repr(pieces["words.weight"])
    with pytest.raises(LifecycleError, match=r"call state_dict\(\), on all ranks"):
        pieces["words.weight"] + 1
    with torch.device("meta"):
        empty = FSDP(nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="still on meta device: "):
        empty.sharded_state_dict()
