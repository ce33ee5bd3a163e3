"""Models of programs, and their batches: trees of leaves (:mod:`tests.programs.leaves`) and composites with children.

Modules take (features, route). Some composites return more than a tensor, as models do whose outputs are dicts,
tuples or dataclasses; whoever calls them opens that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.wrapping.activations import checkpoint_wrapper
from tests.fsdp_models import moved

from .leaves import LEAVES, SharedLinear
from .spec import ModelSpec, Node, Path

BATCH = 3


@dataclass
class Outputs:
    """What a module with a dataclass as output returns; ``parts`` add up to the features."""

    parts: list[torch.Tensor]
    name: str = "outputs"


def opened(outputs: Any) -> torch.Tensor:
    """Features of whatever a module returned."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Outputs):
        return opened(outputs.parts)
    parts = list(outputs.values()) if isinstance(outputs, dict) else list(outputs)
    total = opened(parts[0])
    for part in parts[1:]:
        total = total + opened(part)
    return total


class Composite(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def run(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for module in self.inner:
            x = opened(module(x, route))
        return x


class Chain(Composite):
    def forward(self, x: torch.Tensor, route: int) -> Any:
        return self.run(x, route)


class Residual(Composite):
    def forward(self, x: torch.Tensor, route: int) -> Any:
        return x + 0.5 * torch.tanh(self.run(x, route))


class Twice(Composite):
    """Calls its children twice in a forward."""

    def forward(self, x: torch.Tensor, route: int) -> Any:
        return self.run(torch.tanh(self.run(x, route)), route)


class Recomputed(Composite):
    """Activation checkpointing around its children, which may be units."""

    reentrant = False

    def forward(self, x: torch.Tensor, route: int) -> Any:
        if self.reentrant and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # the re-entrant kind needs an input that asks for a gradient
        return checkpoint(self.run, x, route, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    reentrant = True


def checkpointed(children: list[nn.Module]) -> nn.Module:
    """This library's activation checkpointing around children, which may be units and may change buffers."""
    return checkpoint_wrapper(Chain(children))


class AsTuple(Composite):
    def forward(self, x: torch.Tensor, route: int) -> Any:
        x = self.run(x, route)
        return 0.25 * x, (0.75 * x,)


class AsDict(Composite):
    def forward(self, x: torch.Tensor, route: int) -> Any:
        x = self.run(x, route)
        return {"a": 0.25 * x, "b": [0.75 * x]}


class AsDataclass(Composite):
    def forward(self, x: torch.Tensor, route: int) -> Any:
        x = self.run(x, route)
        return Outputs([0.25 * x, 0.75 * x])


class Detached(Composite):
    """Keeps what comes in, beside children that see none of its gradient."""

    def forward(self, x: torch.Tensor, route: int) -> Any:
        return x + self.run(x.detach(), route)


class Cut(Composite):
    """On the second route no gradient comes through, to its children nor to what is before it."""

    def forward(self, x: torch.Tensor, route: int) -> Any:
        x = self.run(x, route)
        return x.detach() if route else x


COMPOSITES: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "chain": Chain,
    "residual": Residual,
    "twice": Twice,
    "recomputed": Recomputed,
    "recomputed_reentrant": RecomputedReentrant,
    "checkpointed": checkpointed,
    "tuple": AsTuple,
    "dict": AsDict,
    "dataclass": AsDataclass,
    "detached": Detached,
    "cut": Cut,
}


class Deliberate(Exception):
    """Raised by a program on purpose."""


def _fail(grad: torch.Tensor) -> None:
    raise Deliberate


class Model(nn.Module):
    """The chain of nodes and a head to one number; forward returns a dict."""

    def __init__(self, nodes: list[nn.Module], width: int) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(nodes)
        self.head = nn.Linear(width, 1)
        self.fail = ""

    def forward(self, x: torch.Tensor, *, route: int = 0) -> dict[str, torch.Tensor]:
        dying, middle = None, len(self.nodes) // 2
        for k, node in enumerate(self.nodes):
            x = opened(node(x, route))
            if k >= middle and self.fail == "forward":
                raise Deliberate
            if (k < middle or dying is None) and x.requires_grad:
                dying = x
        out = self.head(x).squeeze(1)
        # in backward, after the gradients of what comes later if there are any
        if self.fail and out.requires_grad:
            (out if dying is None else dying).register_hook(_fail)
        return {"out": out}


def seed_generators(seed: int) -> None:
    """As ``torch.manual_seed``, which for devices that may come yet formats the stack: two milliseconds each time."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


class Tree:
    """A model, with its modules by path.

    Attributes:
        modules: the module of each node; they stay the same when units are wrapped around them.
    """

    def __init__(self, spec: ModelSpec, seed: int | None = None) -> None:
        seed_generators(spec.seed if seed is None else seed)
        self.spec = spec
        self.modules: dict[Path, nn.Module] = {}
        model = Model([self._make((i,), node) for i, node in enumerate(spec.nodes)], spec.width)
        self.model: nn.Module = model.to(getattr(torch, spec.dtype))
        self.modules[()] = self.model
        self._share()
        self.attributes = {m: [n for n, _ in m.named_parameters(recurse=False)] for m in self.model.modules()}
        self._raw = {path: list(m.modules()) for path, m in self.modules.items()}
        for path, node in spec.walk():
            self.set_trainable(path, node.frozen, False)
        model.head.requires_grad_(not spec.head_frozen)

    def _make(self, path: Path, node: Node) -> nn.Module:
        if node.kind in COMPOSITES:
            children = [self._make((*path, i), child) for i, child in enumerate(node.children)]
            module: nn.Module = COMPOSITES[node.kind](children)
        else:
            module = LEAVES[node.kind](self.spec.width)
        self.modules[path] = module
        return module

    def _share(self) -> None:
        shared = [m for m in self.model.modules() if isinstance(m, SharedLinear)]
        for other in shared[1:]:
            other.linear.weight = shared[0].linear.weight

    def to(self, device: torch.device) -> None:
        moved(self.model, device)

    def set_trainable(self, path: Path, names: str, trainable: bool) -> None:
        """Sets ``requires_grad`` of a node's parameters that ``names`` ("", "all" or an end) means.

        Reaches them as attributes of their modules, which is where they are before and after wrapping.
        """
        for module in self._raw[path]:
            for name in self.attributes[module]:
                if names == "all" or (names and name.endswith(names)):
                    getattr(module, name).requires_grad_(trainable)

    def wrap(self, path: Path, wrapper: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Puts a wrapper around a node and into its parent."""
        wrapped = wrapper(self.modules[path])
        if path:
            parent = self.modules[path[:-1]]
            siblings = parent.nodes if isinstance(parent, Model) else parent.inner
            siblings[path[-1]] = wrapped  # type: ignore[index,operator,assignment]
        return wrapped


def batch(spec: ModelSpec, seed: int, count: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, D] and targets [B] of one rank for the ``count``-th forward of the program."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + count * 101 + rank)
    dtype = getattr(torch, spec.dtype)
    x = torch.randn(BATCH, spec.width, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def route(routing: str, count: int, rank: int) -> int:
    """The branch that a rank takes in the ``count``-th forward."""
    if routing == "by_rank":
        return (count + rank) % 2
    if routing == "rank_0":
        return int(rank == 0)
    return count % 2


def loss_of(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return ((outputs["out"] - targets) ** 2).mean()
