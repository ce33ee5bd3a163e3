"""Small models with one trait each that sharding has to survive, and which of their parts become units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Wrap = Callable[[nn.Module], nn.Module]


class Tied(nn.Module):
    """One weight under two names; the second use is in another unit if ``head`` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8, bias=False)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = Transposed(self.embed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(x)))


class Transposed(nn.Module):
    """Multiplies by a weight that is another module's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Unused(nn.Module):
    """``b`` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.a(x)))


class Adapted(nn.Module):
    """A frozen layer beside a trainable low-rank one: gradients are all there before the frozen one is done with."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Checkpointed(nn.Module):
    """Recomputes its layers in backward, by a function of a layer and its input."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x


plainly, reentrantly = (partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True))


class Twice(nn.Module):
    """Runs one layer on two branches and once more after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.layer(torch.tanh(self.layer(y) + self.layer(y * 2)))


@dataclass
class Box:
    """An output that is no container torch knows."""

    value: torch.Tensor
    note: str = ""


class Boxed(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Box:
        return Box(self.layer(x))


class Unboxed(nn.Module):
    """Reads the dataclass of an inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Boxed(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.inner(x).value))


class Recurrent(nn.Module):
    """An LSTM keeps references to its weights; a table is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.table((x.detach().abs() * 7).long() % 5))[0]


class Tiny(nn.Module):
    """Parameters smaller than the world, and none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x * self.scale + self.one) + self.nothing.sum()


class Mixed(nn.Module):
    """Parameters of two dtypes, some frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()
        self.narrow.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(torch.tanh(self.narrow(x)).double()).float()


def _units(*names: str) -> Callable[[nn.Module, Wrap], nn.Module]:
    def wrap(model: nn.Module, unit: Wrap) -> nn.Module:
        for name in names:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, unit(model.get_submodule(name)))
        return unit(model)

    return wrap


LAYERS = ("layers.0", "layers.1", "layers.2")
# name -> how it is built, and how it is wrapped
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Wrap], nn.Module]]] = {
    "tied_inside": (Tied, _units("middle")),
    "tied_across": (Tied, _units("embed", "head")),
    "tied_to_root": (Tied, _units("embed")),
    "unused_unit": (Unused, _units("b")),
    "unused_layer": (Unused, _units()),
    "adapted": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()), _units("1", "2")),
    "all_frozen_unit": (lambda: _frozen_middle(), _units("0", "1", "2")),
    "checkpoint_reentrant": (lambda: Checkpointed(reentrantly), _units(*LAYERS)),
    "checkpoint": (lambda: Checkpointed(plainly), _units(*LAYERS)),
    "twice": (Twice, _units("layer")),
    "boxed": (Unboxed, _units("inner")),
    "recurrent": (Recurrent, _units("lstm")),
    "tiny": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), Tiny(), nn.Linear(3, 1)), _units("1")),
    "mixed": (lambda: nn.Sequential(Mixed(), nn.Linear(WIDTH, 1)), _units("0")),
    "norms": (lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.LayerNorm(5)), _units("1")),
    "attention": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
        _units("self_attn"),
    ),
}


def _frozen_middle() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model[1].requires_grad_(False)
    return model


def batch(step: int, world_size: int, rows: int = 4) -> torch.Tensor:
    """The inputs of all ranks at a step, [W, rows, WIDTH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(world_size, rows, WIDTH, generator=generator)


def build(make: Callable[[], Any], seed: int = 0) -> Any:
    """The same model at every call."""
    torch.manual_seed(seed)
    return make()


def moved(model: Any, device: torch.device) -> Any:
    """The model, on a device. A move to XLA makes new parameters, so those with several names are shared anew."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(p, []).append(name)
    model.to(device)
    for first, *others in places.values():
        for module, _, attribute in (name.rpartition(".") for name in others):
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    return model
