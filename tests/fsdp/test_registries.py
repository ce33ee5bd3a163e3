"""What torch's registries show of a wrapped model, beside fairscale: models and trainers walk them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.pools import rank_pool


class Scaled(nn.Module):
    """A parameter, a buffer that is not saved and one that is, between and after modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_parameter("none", None)
        self.register_buffer("saved", torch.ones(1))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale) + self.shift * self.saved + self.unsaved


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def _frozen() -> nn.Module:
    model = nn.Sequential(Scaled(), nn.Linear(3, 2))
    model[0].first.requires_grad_(False)
    model[0].shift.requires_grad_(False)
    return model


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3, 2), torch.ones(2, 3)])
        self.named = nn.ParameterDict({"a": torch.ones(3), "b": torch.zeros(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0] @ self.weights[1] * self.named["a"] + self.named["b"]


# model, shape of its inputs, which children are units of their own
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (2, 3), ()),
    "no bias": (lambda: nn.Linear(3, 2, bias=False), (2, 3), ()),
    "bilinear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), (2, 2, 3), ()),
    "stack": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), (2, 3), ()),
    "stack of units": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)),
        (2, 3),
        ("0", "2"),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3), ()),
    "batch norm unit": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3), ("1",)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.PReLU(3)), (2, 3), ()),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.ConvTranspose1d(3, 2, 1)),
        (2, 2, 3),
        ("0",),
    ),
    "attention": (Attending, (2, 1, 4), ()),
    "attention unit": (Attending, (2, 1, 4), ("attention",)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0), (2, 1, 4), ()),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, 0.0), 2),
        (2, 1, 4),
        ("layers.0", "layers.1"),
    ),
    "parameters between": (Scaled, (2, 3), ()),
    "parameters between units": (Scaled, (2, 3), ("first", "last")),
    "tied": (_tied, (2, 3), ()),
    "frozen": (
        lambda: nn.Sequential(*[m.requires_grad_(False) for m in (nn.Linear(3, 3), nn.Linear(3, 3))]),
        (2, 3),
        ("0",),
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(Scaled(), nn.Linear(3, 3)), Scaled()),
        (2, 3),
        ("0", "0.0", "1"),
    ),
    "lists": (Listed, (2, 3), ()),
    "without parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), (2, 3), ("0", "1")),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "not flat": {"flatten_parameters": False},
    "kept": {"reshard_after_forward": False},
    "half": {"mixed_precision": True},
    "offloaded": {"move_params_to_cpu": True, "state_dict_device": torch.device("cpu")},
}


def _shown(module: nn.Module, summoned: bool = False) -> dict[str, Any]:
    """Everything that torch's registries show below a module.

    In summon_full_params fairscale registers frozen parameters as trainable, and puts names without a parameter first
    and further names of tied ones last. In shardkit all are as the module was written, so this is left out there.
    """

    def own(m: nn.Module) -> list[Any]:
        if summoned:
            return sorted(
                (n, None if p is None else (tuple(p.shape), p.dtype)) for n, p in m._parameters.items()
            )
        return [
            (n, None if p is None else (tuple(p.shape), p.dtype, p.requires_grad))
            for n, p in m._parameters.items()
        ]

    registries = {
        path: (
            own(m),
            [(n, None if b is None else (tuple(b.shape), b.dtype)) for n, b in m._buffers.items()],
            list(m._modules),
            sorted(m._non_persistent_buffers_set),
        )
        for path, m in module.named_modules()
    }
    return {
        "registries": registries,
        "parameters": [tuple(p.shape) for p in module.parameters()],
        "named": [n for n, _ in module.named_parameters()],
        "own": [n for n, _ in module.named_parameters(recurse=False)],
        "buffers": [n for n, _ in module.named_buffers()],
        "children": [n for n, _ in module.named_children()],
    }


def _seen(rank: int, library: str, name: str) -> list[tuple[str, str, Any]]:
    """What is seen of one model with all options, at all moments."""
    wrapper = importlib.import_module(f"{library}.nn.data_parallel").FullyShardedDataParallel
    device = {"compute_device": torch.device("cpu")} if library == "fairscale" else {}
    make, shape, units = MODELS[name]
    found: list[tuple[str, str, Any]] = []
    for described, options in OPTIONS.items():
        torch.manual_seed(0)
        inner = make()
        for path in sorted(units, key=lambda p: -p.count(".")):
            parent = inner.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], wrapper(inner.get_submodule(path), **options, **device))
        model = wrapper(inner, **options, **device)

        def look(moment: str, at: nn.Module = model, described: str = described) -> None:
            found.append((described, moment, _shown(at, moment == "summoned")))

        look("wrapped")
        loss = model(torch.ones(*shape)).sum()
        if loss.requires_grad:
            loss.backward()
        look("trained")
        if "move_params_to_cpu" not in options:  # fairscale: fails on units without parameters of their own
            with model.summon_full_params():
                look("summoned")
            look("sharded again")
            keys = [(k, tuple(v.shape), v.dtype) for k, v in model.state_dict().items()]
            found.append((described, "keys", sorted(keys) if name == "tied" else keys))
            look("saved")
        found.append(
            (described, "local keys", [(k, tuple(v.shape)) for k, v in model.local_state_dict().items()])
        )
        model.eval()(torch.ones(*shape))
        look("evaluated")
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_registries_show_what_fairscale_shows(name: str) -> None:
    theirs = rank_pool(2, "fairscale").run(_seen, "fairscale", name)
    ours = rank_pool(2).run(_seen, "shardkit", name)
    for mine, want in zip(ours, theirs, strict=True):
        for (options, moment, found), (*_, expected) in zip(mine, want, strict=True):
            assert found == expected, (options, moment)
