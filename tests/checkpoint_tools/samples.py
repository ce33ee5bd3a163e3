"""One training's state in every kind of checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardkit.checkpoint.tools import Conversion, convert


class Net(nn.Module):
    """A tied weight, buffers of two kinds, a parameter without dimensions, one that is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.columns = nn.Parameter(torch.randn(5, 3).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.hidden(self.embedding(tokens))))
        return self.head(self.out(hidden) * self.scale + self.columns.sum())


def trained(build: Callable[[], nn.Module] = Net) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an Adam, after two steps."""
    torch.manual_seed(7)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randint(11, (8,))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything() -> dict[str, Any]:
    """As a program of torch saves it."""
    model, optimizer = trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 2,
        "extra": {"seen": [3, 4], "rate": 0.5, "name": "run"},
    }


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """The same with the optimizer's state by names, as DCP has it."""
    state = copy.copy(state)
    names = [n for n, p in Net().named_parameters()]
    optimizer = state["optimizer"]
    state["optimizer"] = {
        "state": {names[k]: v for k, v in optimizer["state"].items()},
        "param_groups": [{**g, "params": [names[k] for k in g["params"]]} for g in optimizer["param_groups"]],
    }
    return state


def make(kind: str, folder: Path) -> str:
    """A checkpoint of a kind; the path to open."""
    state, path = everything(), str(folder / kind)
    if kind == "torch":
        torch.save(state, path)
    elif kind == "bare":
        torch.save(state["model"], path)
    elif kind == "dcp":
        dcp.save(by_name(state), checkpoint_id=path, no_dist=True)
    elif kind == "hf":
        from huggingface_hub import save_torch_state_dict

        (folder / kind).mkdir()
        save_torch_state_dict(
            {k: v.contiguous() for k, v in state["model"].items()}, path, max_shard_size=300
        )
    else:
        source = make("dcp", folder / "source")
        to, ranks = {"shardkit": ("dcp", None), "fairscale": ("fairscale", 3), "xla": ("xla", 2)}[kind]
        convert(source, path, Conversion(to, ranks))
    return path


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, dtypes and values, to the bit."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
