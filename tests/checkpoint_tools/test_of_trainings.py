"""What ``shardkit.save`` writes on several ranks: converted, and restored from what was converted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.checkpoint.format.metadata import read_metadata
from shardkit.checkpoint.tools import Conversion, compare, convert, open_checkpoint, verify
from tests.checkpoint_tools.samples import assert_same
from tests.pools import rank_pool
from tests.training_checkpoints.programs import Place


def _build(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), shardkit.FSDP(nn.Linear(7, 3)))
    wrapped = shardkit.FSDP(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


def _step(model: Any, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(rank: int, folder: str) -> Any:
    """Saves, goes on; does so again from each converted checkpoint: the same numbers."""
    model, optimizer = _build(1)
    _step(model, optimizer, 10 + rank)
    parts: Any = {
        "scaler": shardkit.ShardedGradScaler(init_scale=4.0 + 4.0),
        "loader": Place({"at": 5 + rank}),
    }
    parts["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    extra = {"place": (1, [2]), "log": [{"loss": 0.5}, {}]}
    shardkit.save(folder, model=model, optimizer=optimizer, step=4, extra=extra, **parts)
    drawn = torch.rand(3)
    full = {k: v.clone() for k, v in model.state_dict().items()}
    if rank == 0:
        convert(folder, f"{folder}-dcp", Conversion("dcp"))
        for to in ("torch", "fairscale"):
            convert(folder, f"{folder}-{to}", Conversion(to))
            convert(f"{folder}-{to}", f"{folder}-{to}-dcp", Conversion("dcp"))
    torch.distributed.barrier()
    _step(model, optimizer, 20 + rank)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for to in ("-torch", "-fairscale", ""):
        other, its_optimizer = _build(2)
        its: Any = {"scaler": shardkit.ShardedGradScaler(), "loader": Place(None)}
        its["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(its_optimizer, 7)
        found = shardkit.restore(f"{folder}{to}-dcp", model=other, optimizer=its_optimizer, **its)
        assert found.step == 4
        assert to or found.extra == extra
        assert [s.state_dict() for s in its.values()] == [s.state_dict() for s in parts.values()]
        assert torch.equal(torch.rand(3), drawn)
        _step(other, its_optimizer, 20 + rank)
        found_state = other.state_dict()
        # statistics are each rank's own; the first one's are kept
        own = {k: v for k, v in expected.items() if rank == 0 or "running" not in k}
        assert_same({k: found_state[k] for k in own}, own)
    return full


def test_back_and_forth(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    full = rank_pool(2).run(_train, str(folder))[0]
    source = open_checkpoint(str(folder))
    assert (source.kind, source.facts["step"], source.facts["world_size"]) == ("shardkit", 4, 2)
    assert_same({k: v.read() for k, v in source.model.items()}, full)
    saved = torch.load(f"{folder}-torch", weights_only=False)
    assert saved["extra"]["place"] == (1, [2])
    assert set(saved["rank_states"]) == {"0", "1"}
    back = compare(source, open_checkpoint(f"{folder}-torch-dcp"))
    assert back.differences == []
    for k, (to, ranks) in enumerate([("hf", None), ("xla", 3), ("fairscale", 2)]):
        convert(source, str(tmp_path / str(k)), Conversion(to, ranks))
        result = compare(source, open_checkpoint(str(tmp_path / str(k))))
        assert result.differences == []
        assert result.tensors == len(full)
        assert len(result.not_compared) == 1

    # as of one file, but there are two, and items that are parts of a tensor
    (step,) = folder.iterdir()
    items = list(read_metadata(step).records())
    drawn = random.Random(2)
    for file in sorted(step.glob("*.distcp")):
        for position in drawn.choices(range(file.stat().st_size), k=20):
            content = bytearray(file.read_bytes())
            content[position] ^= 0x10
            file.write_bytes(content)
            (name,) = {
                i.name for i in items if i.file == file.name and i.offset <= position < i.offset + i.length
            }
            assert [(d.file, d.name) for d in verify(str(folder))[0].damages] == [(file.name, name)]
            content[position] ^= 0x10
            file.write_bytes(content)
    assert verify(str(folder))[0].damages == []
