"""A small network, its ways into shards, and training it: in one process or on ranks.

All is fp64: where an optimizer rounds to bf16 in between (Muon) or looks for eigenvectors (SOAP), the last bit of a
gradient, which depends on the order of summing over ranks, becomes a difference of any size in fp32, in one process
too. Matrices are square and gradients have full rank, for the same reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardkit import WholeParameters, hybrid_groups
from tests.doors import through

WIDTH = 6
Spec = tuple[Any, dict[str, Any]]
State = dict[str, Any]


def net(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, width)).to(dtype)


def wrap(model: nn.Sequential, how: str, **options: Any) -> nn.Module:
    if how == "plain":
        return model
    if how == "hybrid":
        options["group"], options["replicas"] = hybrid_groups(2)
    door = {"fully_shard": "fully_shard", "DTensors": "dtensors"}.get(how, "FSDP")
    return through(door, model, "0", "2", **options)  # type: ignore[no-any-return]


def batch(step: int, like: torch.Tensor) -> torch.Tensor:
    """[2, 12, width]: inputs and targets, of all ranks together."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, 12, like.shape[-1], generator=draw, dtype=torch.float64).to(like.dtype)


def train(
    model: nn.Module, optimizer: Any, rank: int = 0, world_size: int = 1, *, steps: range = range(4),
    closure: bool = False, width: int = WIDTH, dtype: torch.dtype = torch.float64,
    before_step: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    switch = getattr(optimizer, "train", None)
    if switch is not None:
        switch()
    for step in steps:
        inputs, targets = batch(step, torch.empty(width, dtype=dtype)).chunk(world_size, dim=1)[rank]

        def evaluated(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).pow(2).mean()
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluated)
        else:
            evaluated()
            before_step()
            optimizer.step()
    switch = getattr(optimizer, "eval", None)
    if switch is not None:
        switch()


def eager() -> contextlib.AbstractContextManager[Any]:
    """Some optimizers compile their update, which takes minutes for nothing here."""
    return torch.compiler.set_stance("force_eager")


def trained(rank: int, world_size: int, how: str, spec: Spec, options: State) -> tuple[State, State]:
    """The model's values and the optimizer's state after some steps on these ranks; for others than 0, nothing."""
    sizes = {k: v for k, v in options.items() if k in ("width", "dtype")}
    model = wrap(net(**_reversed(sizes)), how)
    optimizer = WholeParameters(model, spec[0], **spec[1])
    train(model, optimizer, rank, world_size, **options)
    values, state = model.state_dict(), optimizer.state_dict()
    values = type(values)((k, v.full_tensor() if how == "DTensors" else v) for k, v in values.items())
    return (values, state) if rank == 0 else ({}, {})


def _reversed(sizes: State) -> State:
    return {k: sizes[k] for k in ("dtype", "width") if k in sizes}


def difference(mine: State, truth: State) -> float:
    """The largest, between tensors in nested containers."""
    worst = 0.0
    assert list(mine) == list(truth)
    for key, value in truth.items():
        if key == "Q":  # SOAP's eigenvectors, whose signs are arbitrary
            continue
        worst = max(worst, _apart(mine[key], value))
    return worst


def _apart(mine: Any, truth: Any) -> float:
    if isinstance(truth, dict):
        return difference(mine, truth)
    if isinstance(truth, list | tuple):
        assert len(mine) == len(truth)
        return max([_apart(a, b) for a, b in zip(mine, truth, strict=True)], default=0.0)
    if not isinstance(truth, torch.Tensor):
        assert type(mine) is type(truth)
        return (
            abs(mine - truth)
            if isinstance(truth, float)
            else 0.0
            if type(truth) is not int
            else abs(mine - truth)
        )
    if hasattr(truth, "dequantize") and type(truth) is not torch.Tensor:
        mine, truth = mine.dequantize(), truth.dequantize()
    assert mine.shape == truth.shape
    assert mine.dtype == truth.dtype
    return float((mine.double() - truth.double()).abs().max()) if truth.numel() else 0.0
