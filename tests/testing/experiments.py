"""Experiments for verify: uneven sizes, buffers, dropout, shared weights, units; right ones and wrong ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkit.tools.verify import Experiment


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.second(torch.tanh(self.first(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(3, 5), nn.ModuleList([Block(5, 7), Block(5, 3)])
        self.out, self.unused = nn.Linear(5, 1), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 3, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def loss(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]).to(data[1].dtype), data[1])


def units(model: Any, unit: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = unit(block)


def right() -> Experiment:
    return Experiment(Net, batch, loss, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, wrap=units, clip=0.5)


def _hooked() -> nn.Module:
    """Its gradients depend on how many ranks there are: what one process can't give."""
    model = Net()
    if torch.distributed.get_world_size() > 1:
        model.out.register_full_backward_pre_hook(lambda m, g: (2 * g[0],))
    return model


def wrong() -> Experiment:
    return Experiment(_hooked, batch, loss)


class Plain(nn.Module):
    """Without statistics, which a fixed order refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 1)])
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.drop(torch.tanh(self.blocks[0](x))))


def in_order() -> Experiment:
    return Experiment(Plain, batch, loss, torch.optim.AdamW, {"lr": 0.1}, wrap=units, clip=0.5)


def _last_bit() -> nn.Module:
    model = Plain()
    if torch.distributed.get_world_size() > 1:
        model.blocks[1].register_full_backward_pre_hook(lambda m, g: (g[0] * (1 + 2**-23),))
    return model


def not_in_order() -> Experiment:
    return Experiment(_last_bit, batch, loss)


def _weights_of_fairscale() -> nn.Module:
    """Written for fairscale: it wraps its own parts."""
    from fairscale.nn import checkpoint_wrapper, wrap

    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(checkpoint_wrapper(block))
    return model


def for_fairscale() -> Experiment:
    return Experiment(_weights_of_fairscale, batch, loss, torch.optim.SGD, {"lr": 0.1})


def broken() -> Experiment:
    return Experiment(lambda: nn.Linear(3, 1), batch, lambda model, data: model(data[0]))


fixed = Experiment(Net, batch, loss)
nothing = 3
