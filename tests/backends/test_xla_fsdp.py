"""FSDP on XLA replicas: equal to one process, one compile, exactly the expected collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import FSDP, PrecisionPolicy, ReshardPolicy, ShardedGradScaler, auto_wrap, enable_wrap
from shardkit.backend import get_backend
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


STEPS = 4
WORDS, TOKENS, BATCH = 11, 5, 3


# ------------------------------------------------------------------ models: [B, T] tokens -> [B, T, C]
class Block(nn.Module):
    """Sizes that no number of ranks divides, and tiny ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Attention(nn.Module):
    """Saves views of parts of a parameter for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(self.bias[1] * x) + self.attention(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    """Embedding, blocks, a convolution, a head."""

    def __init__(self, blocks: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.blocks = nn.Sequential(blocks(), blocks())
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(tokens))
        x = torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x)

    def tie(self) -> None:
        """Again after a move to XLA, which makes new parameters."""


class TiedAcross(Net):
    """The head, in a unit of its own, has the weight of the embedding, in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(WORDS, 6))
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.words[0].weight


class Doubled(nn.Module):
    """One weight used twice within a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tie()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))

    def tie(self) -> None:
        self.b.weight = self.a.weight


class TiedInside(Net):
    def __init__(self) -> None:
        super().__init__(Doubled)

    def tie(self) -> None:
        for block in self.blocks:
            block.tie()


class Frozen(Net):
    """The first block and, within the others, all biases."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_(not name.startswith("blocks.0") and "bias" not in name)


class WithSpare(Block):
    """Has a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 5)


class Unused(Net):
    """Layers, and a unit, that nobody calls."""

    def __init__(self) -> None:
        super().__init__(WithSpare)
        self.spare = nn.Conv1d(6, 6, 3)


class Recomputed(Block):
    """Activations are computed anew in backward, by one of three functions."""

    kind = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "xla":
            from torch_xla.utils.checkpoint import checkpoint as theirs

            return theirs(super().forward, x)
        if self.kind == "none":
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.kind == "reentrant")


class RecomputedUnits(Net):
    """The same around the units."""

    kind = "none"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            if self.kind == "xla":
                from torch_xla.utils.checkpoint import checkpoint as theirs

                x = theirs(block, x)
            elif self.kind == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        x = torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x)


# ------------------------------------------------------------------ how they are wrapped
def nested(net: Any, **options: Any) -> FSDP:
    """Each block, the convolution and the head; the embedding is the root's or, if it is a block, a unit too."""
    if isinstance(net.words, nn.Sequential):
        net.words = FSDP(net.words, **options)
    for k, block in enumerate(net.blocks):
        net.blocks[k] = FSDP(block, **options)
    if hasattr(net, "spare"):
        net.spare = FSDP(net.spare, **options)
    net.mix = FSDP(net.mix, **options)
    net.head = FSDP(net.head, **options)
    return FSDP(net, **options)


def by_policy(net: Any, **options: Any) -> FSDP:
    with enable_wrap(wrapper_cls=FSDP, **options):
        return FSDP(auto_wrap(net, min_num_params=100), **options)


def whole(net: Any, **options: Any) -> FSDP:
    return FSDP(net, **options)


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        kind: for the models that compute activations anew.
        micro: batches a step; all but the last one inside ``no_sync``.
        clip: largest norm of the gradients.
        scaled: with ShardedGradScaler.
        evaluates: with a forward in eval mode, and one without gradients, after each step.
    """

    build: Callable[[], Any] = Net
    wrap: Callable[..., FSDP] = nested
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    optimizer: Any = torch.optim.SGD
    micro: int = 1
    clip: float | None = None
    scaled: bool = False
    evaluates: bool = False
    tolerance: float = 1e-6

    def net(self) -> Any:
        net = self.build()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
        return net

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.optimizer is torch.optim.SGD else {}
        return self.optimizer(net.parameters(), lr=0.05, weight_decay=0.1, **options)


class _XlaForCheckpoint:
    """torch.utils.checkpoint asks for the module ``torch.xla``, which torch_xla does not provide."""


class recomputing(contextlib.AbstractContextManager[None]):
    """Inside, activations are computed anew in this way."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        Recomputed.kind = RecomputedUnits.kind = self._kind or "none"
        if self._kind:
            torch.xla = _XlaForCheckpoint  # type: ignore[attr-defined]

    def __exit__(self, *_: Any) -> None:
        Recomputed.kind = RecomputedUnits.kind = "none"


BF16 = PrecisionPolicy(compute=torch.bfloat16, buffers=torch.bfloat16)
KEPT, FREED = ReshardPolicy(after_forward=False), ReshardPolicy(after_forward=True, root=True)

CASES = {
    "nested": Case(),
    "attention": Case(build=lambda: Net(Attention)),
    "auto_wrap": Case(wrap=by_policy),
    "one unit": Case(wrap=whole),
    "not flat": Case(options={"flatten": False}),
    "kept after forward": Case(options={"reshard": KEPT}),
    "root freed": Case(options={"reshard": FREED, "flatten": False}),
    "bf16": Case(options={"precision": BF16}, tolerance=3e-2),
    "no_sync": Case(micro=3, clip=0.5),
    "clip": Case(clip=0.1, options={"flatten": False}),
    "tied inside": Case(build=TiedInside),
    "tied inside, not flat": Case(build=TiedInside, options={"flatten": False}),
    "tied across": Case(build=TiedAcross),
    "frozen": Case(build=Frozen),
    "unused": Case(build=Unused),
    "scaler": Case(scaled=True),
    "eval": Case(evaluates=True),
} | {
    f"recomputed {where}, {kind}": Case(build=build, kind=kind)
    for where, build in (("inside", lambda: Net(Recomputed)), ("outside", RecomputedUnits))
    for kind in ("reentrant", "plain", "xla")
}
ON_FOUR = ("nested", "not flat", "no_sync", "tied across", "frozen", "unused")


def batch(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and what comes after them, [B, T]."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    tokens = torch.randint(WORDS, (BATCH, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(net: nn.Module, rank: int, count: int, device: torch.device) -> torch.Tensor:
    tokens, targets = (t.contiguous().to(device) for t in batch(rank, count))
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), targets.flatten())


# ------------------------------------------------------------------ runs
@functools.cache
def truth(name: str, world_size: int) -> dict[str, Any]:
    """One process: for each step the losses by rank, and the parameters in the end."""
    case = CASES[name]
    net = case.net()
    optimizer = case.make_optimizer(net)
    losses, evaluated, cpu = [], [], torch.device("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.micro):
            values = [loss_of(net, r, step * case.micro + micro, cpu) for r in range(world_size)]
            (sum(values) / world_size).backward()  # type: ignore[union-attr]
        losses.append([v.item() for v in values])
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()
        if case.evaluates:
            evaluated.append([loss_of(net, r, 99, cpu).item() for r in range(world_size)])
    return {"losses": losses, "evaluated": evaluated, "state": net.state_dict()}


def train(rank: int, name: str) -> dict[str, Any]:
    """The same with FSDP: this rank's losses, the full state dict, and what XLA did."""
    case = CASES[name]
    backend = get_backend("xla")
    net = case.net().to(backend.device())
    net.tie()
    with recomputing(case.kind):
        model = case.wrap(net, **case.options)
        optimizer = case.make_optimizer(model)
        backend.mark_step(wait=True)
        losses, evaluated, compiles, seen = [], [], [], {}
        scaler = ShardedGradScaler(init_scale=2.0**8) if case.scaled else None
        for step in range(STEPS):
            loss = _backward(case, model, optimizer, scaler, rank, step)
            if step == STEPS - 1:
                seen = _program(model, loss, case.micro)
            _update(case, model, optimizer, scaler)
            if case.evaluates:
                evaluated.append(_evaluate(model, rank))
            backend.mark_step(wait=True)
            losses.append(loss.detach())
            compiles.append(_compiles())
        state = model.state_dict()
        backend.mark_step()
    return {
        "losses": [x.item() for x in losses],
        "evaluated": [x.item() for x in evaluated],
        "state": {k: v.detach().cpu() for k, v in state.items()},
        "compiles": compiles,
        **seen,
    }


def _backward(
    case: Case, model: FSDP, optimizer: torch.optim.Optimizer, scaler: Any, rank: int, step: int
) -> torch.Tensor:
    device = next(model.parameters()).device
    optimizer.zero_grad()
    for micro in range(case.micro):
        with model.no_sync() if micro < case.micro - 1 else contextlib.nullcontext():
            loss = loss_of(model, rank, step * case.micro + micro, device)
            (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


def _update(case: Case, model: FSDP, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    if case.clip is not None:
        model.clip_grad_norm_(case.clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _evaluate(model: FSDP, rank: int) -> torch.Tensor:
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        without = loss_of(model, rank, 99, device)
    with_gradients = loss_of(model, rank, 99, device)  # no backward follows
    model.train()
    return (without + with_gradients.detach()) / 2


def _program(model: FSDP, loss: torch.Tensor, micro: int) -> dict[str, Any]:
    """Collectives in the program of a forward and backward, and how many there should be."""
    from shardkit.backends.xla import metrics

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"collectives": dict(metrics.collectives([loss, *gradients])), "expected": expected(model, micro)}


def expected(model: FSDP, micro: int) -> dict[str, int]:
    """One all-gather for each unit, dtype and pass, less those that backward finds gathered; a reduction for each flat
    parameter."""
    last = model._state.engine._order[-1]
    gathers = reduced = 0
    for unit in dict.fromkeys(model._state.engine._order):
        again = [v for v in unit.needs if not unit.keep_after_forward and v not in last.needs]
        gathers += sum(len({flat.param.dtype for flat in flats}) for flats in (unit.needs, again))
        reduced += sum(1 for p in unit.packs if any(p.trainable))
    return {"all-gather": gathers * micro, "reduce-scatter": reduced}


def _compiles() -> int:
    from shardkit.backends.xla import metrics

    group = get_backend("xla").group()
    group.barrier()  # so that the counter, which is the process's, holds still
    count = metrics.compiles()
    group.barrier()
    return count


# ------------------------------------------------------------------ state
def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    backend = get_backend("xla" if next(model.parameters()).device.type == "xla" else "gloo")
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step, backend.device())
        loss.backward()
        optimizer.step()
        backend.mark_step()
        losses.append(loss.detach())
    return [x.item() for x in losses]


def save(rank: int, backend_name: str, flatten: bool) -> dict[str, Any]:
    """Two steps, and then all kinds of state, on the CPU."""
    case = Case(optimizer=torch.optim.Adam, options={"flatten": flatten})
    model = case.wrap(case.net().to(get_backend(backend_name).device()), **case.options)
    optimizer = case.make_optimizer(model)
    losses = _steps(model, optimizer, rank, range(2))
    return {
        "losses": losses,
        "full": {k: v.detach().cpu() for k, v in model.state_dict().items()},
        "local": {k: v.detach().cpu() for k, v in model.local_state_dict().items()},
        "cut": "alike" if flatten else backend_name,  # between rows ranks may hold parts of other sizes
        "metadata": model.local_metadata_dict(),
        "optimizer": model.gather_full_optim_state_dict(optimizer),
    }


def resume(rank: int, backend_name: str, flatten: bool, saved: list[dict[str, Any]]) -> list[float]:
    """Two more steps from there with a fresh model, at any number of ranks."""
    case = Case(optimizer=torch.optim.Adam, options={"flatten": flatten})
    net = case.net().to(get_backend(backend_name).device())
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    model = case.wrap(net, **case.options)
    optimizer = case.make_optimizer(model)
    alike = saved[0]["cut"] in ("alike", backend_name)
    if alike and len(saved) == get_backend(backend_name).group().world_size:
        model.load_local_state_dict(saved[rank]["local"])
    else:
        model.load_state_dict(saved[0]["full"])
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(saved[0]["optimizer"]))
    return _steps(model, optimizer, rank, range(2, 4))


def plain_with_adam(world_size: list[int]) -> list[list[float]]:
    """Losses by step and rank of one process, whose number of ranks changes from step to step."""
    case = Case(optimizer=torch.optim.Adam)
    net = case.net()
    optimizer = case.make_optimizer(net)
    losses = []
    for step, ranks in enumerate(world_size):
        optimizer.zero_grad()
        values = [loss_of(net, r, step, torch.device("cpu")) for r in range(ranks)]
        (sum(values) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append([v.item() for v in values])
    return losses


# ------------------------------------------------------------------ what a TPU would run
def on_native_collectives(rank: int, name: str) -> dict[str, Any]:
    """The program with the collectives of a TPU, without those that nobody needs the result of."""
    from shardkit.backends.xla import metrics
    from shardkit.backends.xla.cpu_replicas import current_world
    from shardkit.backends.xla.group import XlaGroup
    from shardkit.backends.xla.runtime import NativeCollectives, Replica
    from tests.xla.meeting import in_memory

    world = current_world()
    assert world is not None
    backend = get_backend("xla")
    replica = Replica(rank, world.size, NativeCollectives(), in_memory(world.here()))
    group = XlaGroup(backend, replica, range(world.size))  # type: ignore[arg-type]
    case = CASES[name]
    model = case.wrap(case.net().to(backend.device()), group=group, **case.options)
    backend.mark_step(wait=True)
    for step in range(2):
        loss = loss_of(model, rank, step, backend.device())
        loss.backward()
        if step == 1:
            break
        model.zero_grad()
        backend.mark_step(wait=True)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    hlo = metrics.hlo([loss, *gradients])
    found = _program(model, loss, 1)
    backend.mark_step(wait=True)
    return {**found, "barriers": hlo.count(" opt-barrier("), "loss": loss.item()}


def assert_equal(name: str, world_size: int, results: list[dict[str, Any]]) -> None:
    case, one = CASES[name], truth(name, world_size)
    for rank, result in enumerate(results):
        for what in ("losses", "evaluated"):
            wanted = [step[rank] for step in one[what]]
            assert result[what] == pytest.approx(wanted, rel=case.tolerance, abs=case.tolerance), (what, rank)
        assert list(result["state"]) == list(one["state"])
        tolerance = 10 * case.tolerance
        for key, value in result["state"].items():
            torch.testing.assert_close(
                value, one["state"][key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


RUNS = [(2, name) for name in CASES] + [(4, name) for name in ON_FOUR]


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_training_equals_one_process(world_size: int, name: str) -> None:
    results = rank_pool(world_size, "xla").run(train, name)
    assert_equal(name, world_size, results)
    for result in results:
        compiles = result["compiles"]
        # the first step makes optimizer state, the second is the steady state
        assert compiles[-2] == compiles[1], f"compiles after each step: {compiles}"
        assert result["collectives"] == result["expected"]


@pytest.mark.parametrize("flatten", [True, False])
def test_state_goes_to_other_backends_and_numbers_of_ranks(flatten: bool) -> None:
    one = plain_with_adam([2, 2, 2, 2])
    saved = rank_pool(2, "xla").run(save, "xla", flatten)
    gloo = rank_pool(2, "gloo").run(save, "gloo", flatten)
    full = FSDP.consolidate_shard_weights([s["local"] for s in saved], [s["metadata"] for s in saved])
    for rank, (s, g) in enumerate(zip(saved, gloo, strict=True)):
        assert s["losses"] == pytest.approx([step[rank] for step in one[:2]], rel=1e-5)
        torch.testing.assert_close(s["full"], g["full"], rtol=1e-5, atol=1e-6)
        if flatten:
            torch.testing.assert_close(s["local"], g["local"], rtol=1e-5, atol=1e-6)
            assert s["metadata"] == g["metadata"]
    torch.testing.assert_close(full, saved[0]["full"])
    torch.testing.assert_close(saved[0]["optimizer"], gloo[0]["optimizer"], rtol=1e-4, atol=1e-6)
    for backend, start in (("xla", gloo), ("gloo", saved)):
        for rank, losses in enumerate(rank_pool(2, backend).run(resume, backend, flatten, start)):
            assert losses == pytest.approx([step[rank] for step in one[2:]], rel=1e-5)
    one = plain_with_adam([2, 2, 4, 4])
    for rank, losses in enumerate(rank_pool(4, "xla").run(resume, "xla", flatten, saved)):
        assert losses == pytest.approx([step[rank] for step in one[2:]], rel=1e-5)


@pytest.mark.parametrize("name", ["nested", "attention", "bf16"])
def test_a_compiler_finds_no_gather_that_it_can_drop_or_merge(name: str) -> None:
    """Else it would keep what forward gathered until backward."""
    for result in rank_pool(2, "xla").run(on_native_collectives, name):
        assert result["collectives"] == result["expected"]
        assert result["barriers"] == result["expected"]["all-gather"]
