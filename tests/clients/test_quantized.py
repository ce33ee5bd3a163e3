"""torchao's training over sharded parameters, beside FSDP2: optimizers whose state is quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp  # where install() may replace it
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from shardkit.errors import ConfigurationError
from tests.pools import on_ranks
from tests.whole_parameters.nets import eager

optim = pytest.importorskip("torchao.optim", reason="a package of the extra 'libraries'")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64))


def made(shard: Any, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Matrices have more than 4096 elements on each rank, of which torchao makes codes of 8 bits."""
    model, mesh = net(), init_device_mesh("cpu", (world,))
    shard(model[0], mesh=mesh)
    shard(model, mesh=mesh)
    return model, optim.AdamW8bit(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[list[float]]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(3, 64, generator=draw)).square().mean()
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append([loss.item(), float(norm.full_tensor())])
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.filterwarnings("ignore")  # of packages
@on_ranks(2, 3)
def test_quantized_state_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    """As with FSDP2, from its checkpoints and into them; save_training, whose files hold plain tensors, says so."""
    doors = (shardkit.fully_shard, fsdp.fully_shard)
    every = []
    with eager():
        for number, (saves, loads) in enumerate((a, b) for a in doors for b in doors):
            model, optimizer = made(saves, world_size)
            losses = train(model, optimizer, rank, range(2))
            folder = tmp_path / str(number)
            save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
            if saves is shardkit.fully_shard:
                with pytest.raises(ConfigurationError, match=r"OptimState8bit.*get_state_dict"):
                    shardkit.save_training(tmp_path / "own", model=model, optimizer=optimizer, step=2)
                assert shardkit.latest(tmp_path / "own") is None
                extra = {"state": optimizer.state_dict()["state"][0]}
                with pytest.raises(ConfigurationError, match=r"OptimState8bit.*get_state_dict"):
                    shardkit.save_training(tmp_path / "own", step=2, extra=extra)
            losses += train(model, optimizer, rank, range(2, 4))
            again, other = made(loads, world_size)
            found: dict[str, Any] = dict(zip("mo", get_state_dict(again, other), strict=True))
            load(found, checkpoint_id=folder)
            set_state_dict(again, other, model_state_dict=found["m"], optim_state_dict=found["o"])
            gone_on = torch.tensor(train(again, other, rank, range(2, 4)))
            torch.testing.assert_close(gone_on, torch.tensor(losses[2:]), rtol=0, atol=1e-7)
            every.append(losses)
        torch.testing.assert_close(torch.tensor(every[:2]), torch.tensor(every[2:]), rtol=0, atol=1e-5)
