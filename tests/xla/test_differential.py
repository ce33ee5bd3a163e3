"""FSDP on XLA replicas by three wrappers beside one process: shardkit's, its torch_xla interface, torch_xla's own.

Models and options are  SHARDKIT_FUZZ=n draws n times as many, and new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.pools import rank_pool
from tests.programs.running import examples

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


STEPS, ROWS = 3, 3
LIBRARIES = ("core", "shardkit", "torch_xla")  # shardkit.FSDP, shardkit.xla.fsdp's, torch_xla's own


@dataclass(frozen=True)
class Node:
    """A module [B, D] -> [B, D].

    Attributes:
        kind: of :data:`LEAVES`, or "chain" for its children one after the other.
        unit: whether it is wrapped.
        frozen: whether its weights (not its biases) are.
    """

    kind: str
    unit: bool = False
    frozen: bool = False
    children: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        options: arguments of torch_xla's wrapper, the same for all units.
        micro: batches a step.
        no_sync: whether gradients of all but the last one stay where they are.
        clip: largest norm of the gradients.
    """

    nodes: tuple[Node, ...]
    width: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    micro: int = 1
    no_sync: bool = False
    clip: float | None = None


# ------------------------------------------------------------------ models
class Scale(nn.Module):
    """A parameter of one element, one of two dimensions of which a row is used, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(2, width))
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, width))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.factor + self.weight[1] + self.offset)


class Residual(nn.Module):
    """Saves views of a weight; sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mixed(nn.Module):
    """A convolution over the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x.unsqueeze(1))).sum(1)


LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "norm": nn.LayerNorm,
    "scale": Scale,
    "residual": Residual,
    "conv": Mixed,
}


def build(node: Node, width: int) -> nn.Module:
    if node.kind == "chain":
        return nn.Sequential(*(build(child, width) for child in node.children))
    module = LEAVES[node.kind](width)
    for name, p in module.named_parameters():
        p.requires_grad_(not (node.frozen and "bias" not in name))
    return module


def net(program: Program) -> nn.Sequential:
    """Start values depend on shapes only."""
    whole = Node("chain", children=(Node("linear"), *program.nodes))
    model = build(whole, program.width)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    assert isinstance(model, nn.Sequential)
    return model


def wrapped(program: Program, wrap: Callable[[nn.Module], nn.Module]) -> Any:
    def inside(node: Node, module: nn.Module) -> nn.Module:
        for index, child in enumerate(node.children):
            module[index] = inside(child, module[index])  # type: ignore[index, operator]
        return wrap(module) if node.unit else module

    whole = Node("chain", unit=True, children=(Node("linear"), *program.nodes))
    return inside(whole, net(program))


def wrapper(library: str, options: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    options = {**options, "execute_sharding_on_init": False}  # as many programs less to compile
    align = options.pop("align", None)  # of the core's own alone
    if library == "torch_xla":
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

        rows = options.get("shard_param_on_dim_0") and not options.get("flatten_parameters")
        options["coalesce_all_gather_ops"] = bool(rows and options.get("coalesce_all_gather_ops"))
        # ... which gathers nothing unless shards are rows
        return lambda m: Theirs(m, pin_layout_in_collective_ops=False, **options)
    if library == "shardkit":
        from shardkit.xla.fsdp import XlaFullyShardedDataParallel as Ours

        return lambda m: Ours(m, **options)
    from shardkit import FSDP, PrecisionPolicy, ReshardPolicy
    from shardkit.backend import get_backend

    reshard = ReshardPolicy(
        options.get("reshard_after_forward", True), not options.get("disable_reshard_on_root", True)
    )
    precision = PrecisionPolicy(compute=options.get("compute_dtype"))
    flatten = options.get("flatten_parameters", False)
    device = get_backend("xla").device()
    if not flatten and align == "parameters":
        align = "rows"
    return lambda m: FSDP(m.to(device), flatten=flatten, reshard=reshard, precision=precision, align=align)


# ------------------------------------------------------------------ runs
def loss_of(program: Program, model: nn.Module, rank: int, count: int, device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    x, y = (torch.randn(ROWS, program.width, generator=generator).to(device) for _ in range(2))
    return nn.functional.mse_loss(model(x), y)


def optimizer_for(program: Program, params: Any) -> torch.optim.Optimizer:
    listed = [p for p in params if p.requires_grad]
    if program.optimizer == "adam":
        # with the usual eps, rounding of a gradient that is about zero decides on the direction of a step
        return torch.optim.Adam(listed, lr=0.01, eps=1e-3, weight_decay=0.1)
    return torch.optim.SGD(listed, lr=0.05, momentum=0.9, weight_decay=0.1)


def truth(program: Program, world_size: int) -> dict[str, Any]:
    """One process: losses by step and rank, norms of gradients, parameters and buffers in the end."""
    model = net(program)
    optimizer = optimizer_for(program, model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(program.micro):
            count = step * program.micro + micro
            values = [loss_of(program, model, r, count, "cpu") for r in range(world_size)]
            (torch.stack(values).sum() / world_size).backward()
        losses.append([v.item() for v in values])
        if program.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), program.clip).item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "full": model.state_dict()}


def run(rank: int, program: Program) -> dict[str, dict[str, Any]]:
    """The same with each wrapper, one after the other in the same replica."""
    return {library: _train(rank, program, library) for library in LIBRARIES}


def _train(rank: int, program: Program, library: str) -> dict[str, Any]:
    import torch_xla

    model = wrapped(program, wrapper(library, program.options))
    optimizer = optimizer_for(program, model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(program.micro):
            last = micro == program.micro - 1
            with model.no_sync() if program.no_sync and not last else contextlib.nullcontext():
                loss = loss_of(program, model, rank, step * program.micro + micro, "xla")
                loss.backward()
        if program.clip is not None:
            norms.append(model.clip_grad_norm_(program.clip))
        optimizer.step()
        losses.append(loss.detach())
        torch_xla.sync()
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    result = {"losses": [x.item() for x in losses], "norms": [x.item() for x in norms], "state": state}
    if library != "core":
        result["metadata"] = model.get_shard_metadata()
    return result


LEAF = st.builds(
    Node, st.sampled_from(list(LEAVES)), st.booleans(), frozen=st.sampled_from([False] * 3 + [True])
)
CHAIN = st.builds(
    lambda unit, children: Node("chain", unit, children=tuple(children)),
    st.booleans(),
    st.lists(LEAF, min_size=1, max_size=2),
)
SWITCHES = (
    "reshard_after_forward",
    "flatten_parameters",
    "disable_reshard_on_root",
    "shard_param_on_dim_0",
    "coalesce_all_gather_ops",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    options: dict[str, Any] = {name: draw(st.booleans()) for name in SWITCHES}
    options["compute_dtype"] = draw(st.sampled_from([None, torch.float32]))
    options["align"] = draw(st.sampled_from([None, "parameters", "rows", 4]))
    micro = draw(st.integers(1, 3))
    return Program(
        tuple(draw(st.lists(LEAF | CHAIN, min_size=1, max_size=3))),
        draw(st.integers(3, 9)),
        options,
        draw(st.sampled_from(["sgd", "adam"])),
        micro,
        micro > 1 and draw(st.booleans()),
        draw(st.sampled_from([None, 0.1])),
    )


def assert_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def check(program: Program, world_size: int) -> None:
    from torch_xla.distributed import fsdp as theirs

    from shardkit.xla import fsdp as ours

    one = truth(program, world_size)
    ranks = rank_pool(world_size, "xla").run(run, program)
    for library in LIBRARIES:
        for rank, result in enumerate(ranks):
            wanted = [step[rank] for step in one["losses"]]
            assert result[library]["losses"] == pytest.approx(wanted, rel=1e-6, abs=1e-6), (library, rank)
            assert result[library]["norms"] == pytest.approx(one["norms"], rel=1e-5), (library, rank)
    full: dict[str, Any] = {"core": ranks[0]["core"]["state"]}
    for library in ("shardkit", "torch_xla"):
        parts = [result[library]["state"] for result in ranks]
        for reader in (ours, theirs):
            joined = reader.consolidate_sharded_state_dicts(parts, ranks[0][library]["metadata"])
            full.setdefault(library, joined)
            assert_same(joined, full[library], 0.0)
    for library in LIBRARIES:
        assert_same(full[library], one["full"], 1e-5)
    for library in ("core", "shardkit"):
        assert_same(full[library], full["torch_xla"], 1e-5)


@examples(5)
@given(programs())
def test_two_replicas(program: Program) -> None:
    check(program, 2)


@examples(3)
@given(programs())
def test_four_replicas(program: Program) -> None:
    check(program, 4)
