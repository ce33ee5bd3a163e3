"""FSDP on XLA replicas: equal to one process, one compile, exactly the expected collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, PrecisionPolicy, ReshardPolicy, ShardedGradScaler, auto_wrap, enable_wrap
from shardkit.backend import get_backend
from shardkit.errors import RankFailedError
from tests.beside import batch
from tests.fsdp_models import MODELS, WIDTH, Checkpointed, Tied, Wrap, build, moved, plainly, reentrantly
from tests.pools import rank_pool, run_once

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


STEPS = 4


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tiny one, a convolution, and a layer with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7, bias=False)
        self.block = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh())
        self.mix, self.scale = nn.Conv1d(1, 2, 3, padding=1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.scale * self.block(x)
        return torch.tanh(self.mix(x.unsqueeze(1)))


def nested(net: Any, unit: Wrap) -> nn.Module:
    for name, part in list(net.named_children()):
        setattr(net, name, unit(part))
    return unit(net)


def whole(net: nn.Module, unit: Wrap) -> nn.Module:
    return unit(net)


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        build, wrap: the model, and which of its parts are units.
        alone: what one process has in the model's place.
        micro: batches a step; all but the last one inside ``no_sync``.
        clip: largest norm of the gradients.
        scaled: with ShardedGradScaler.
        evaluates: with a forward in eval mode, and one without gradients, after each step.
    """

    build: Callable[[], nn.Module] = Net
    wrap: Callable[[nn.Module, Wrap], nn.Module] = nested
    alone: Callable[[], nn.Module] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = torch.optim.SGD
    micro: int = 1
    clip: float | None = None
    scaled: bool = False
    evaluates: bool = False
    tolerance: float = 1e-6

    def model(self, device: torch.device, **options: Any) -> Any:
        """Sharded, on a device."""
        unit = partial(FSDP, **{**self.options, **options})
        return self.wrap(moved(build(self.build), device), unit)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.optimizer is torch.optim.SGD else {}
        return self.optimizer(net.parameters(), lr=0.05, weight_decay=0.1, **options)


def by_policy(net: nn.Module, unit: Any) -> nn.Module:
    with enable_wrap(wrapper_cls=FSDP, **unit.keywords):
        return unit(auto_wrap(net, min_num_params=50))


def by_torch_xla(layer: nn.Module, x: torch.Tensor) -> Any:
    from torch_xla.utils.checkpoint import checkpoint

    return checkpoint(layer, x)


BF16 = PrecisionPolicy(compute=torch.bfloat16, buffers=torch.bfloat16)
KEPT, FREED = ReshardPolicy(after_forward=False), ReshardPolicy(after_forward=True, root=True)
ROWS = {"flatten": False}

CASES = {
    "nested": Case(),
    "auto_wrap": Case(wrap=by_policy),
    "one unit": Case(wrap=whole),
    "not flat": Case(options=ROWS),
    "kept after forward": Case(options={"reshard": KEPT}),
    "root freed": Case(options={"reshard": FREED, **ROWS}),
    "bf16": Case(options={"precision": BF16}, tolerance=3e-2),
    "no_sync": Case(micro=3, clip=0.5),
    "clip": Case(clip=0.1, options=ROWS),
    "scaler": Case(scaled=True),
    "eval": Case(evaluates=True),
    "tied across": Case(Tied),
    "tied inside, not flat": Case(*MODELS["tied_inside"], options=ROWS),
    **{
        name.replace("_", " "): Case(*MODELS[name])
        for name in (
            *("attention", "tied_inside", "adapted", "all_frozen_unit"),
            *("unused_unit", "unused_layer", "boxed"),
        )
    },
} | {
    f"recomputed {where}, {kind}": Case(
        partial(Checkpointed, call), wrap, partial(Checkpointed, nn.Module.__call__)
    )
    for where, wrap in (("inside", whole), ("outside", MODELS["checkpoint"][1]))
    for kind, call in (("reentrant", reentrantly), ("plain", plainly), ("xla", by_torch_xla))
}
ADAM = Case(optimizer=torch.optim.Adam)
ON_FOUR = ("nested", "not flat", "no_sync", "tied across", "all frozen unit", "unused unit")


def loss_of(net: nn.Module, rank: int, count: int) -> torch.Tensor:
    output: torch.Tensor = net(batch(rank, count).to(next(net.parameters()).device))
    return output.float().square().mean()


# ------------------------------------------------------------------ runs
def train(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """With FSDP, and beside it in one process: losses, both states, and what XLA did."""
    vars(torch).setdefault("xla", object())  # torch.utils.checkpoint asks for it, and torch_xla has none
    case, backend, plain = CASES[name], get_backend("xla"), build(CASES[name].alone or CASES[name].build)
    model = case.model(backend.device())
    optimizer, alone = case.make_optimizer(model), case.make_optimizer(plain)
    backend.mark_step(wait=True)
    losses, compiles, seen = [], [], {}
    scaler = ShardedGradScaler(init_scale=2.0**8) if case.scaled else None
    for step in range(STEPS):
        optimizer.zero_grad()
        alone.zero_grad()
        for micro in range(case.micro):
            count = step * case.micro + micro
            with model.no_sync() if micro < case.micro - 1 else contextlib.nullcontext():
                loss = loss_of(model, rank, count)
                (loss if scaler is None else scaler.scale(loss)).backward()
            wanted = torch.stack([loss_of(plain, r, count) for r in range(world_size)])
            wanted.mean().backward()
        if step == STEPS - 1:
            seen = _program(model, loss, case.micro)
        losses.append((loss.detach(), wanted[rank].item()))
        if case.clip is not None:
            model.clip_grad_norm_(case.clip)
            nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        alone.step()
        if case.evaluates:
            losses.append((_evaluate(model, rank), loss_of(plain, rank, 99).item()))
        backend.mark_step(wait=True)
        compiles.append(_compiles())
    state = model.state_dict()
    backend.mark_step()
    return {
        "losses": [(mine.item(), one) for mine, one in losses],
        "states": ({k: v.detach().cpu() for k, v in state.items()}, plain.state_dict()),
        "compiles": compiles,
        **seen,
    }


def _evaluate(model: FSDP, rank: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        without = loss_of(model, rank, 99)
    with_gradients = loss_of(model, rank, 99)  # no backward follows
    model.train()
    return (without + with_gradients.detach()) / 2


def _program(model: FSDP, loss: torch.Tensor, micro: int) -> dict[str, Any]:
    """Collectives in the program of a forward and backward, and how many there should be."""
    from tests.xla import pending_program

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "collectives": dict(pending_program.collectives([loss, *gradients])),
        "expected": expected(model, micro),
    }


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
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        backend.mark_step()
        losses.append(loss.detach())
    return [x.item() for x in losses]


def save(rank: int, backend_name: str, flatten: bool) -> dict[str, Any]:
    """Two steps, and then all kinds of state, on the CPU."""
    model = ADAM.model(get_backend(backend_name).device(), flatten=flatten)
    optimizer = ADAM.make_optimizer(model)
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
    fresh = replace(ADAM, build=lambda: build(Net, seed=1))
    model = fresh.model(get_backend(backend_name).device(), flatten=flatten)
    optimizer = ADAM.make_optimizer(model)
    alike = saved[0]["cut"] in ("alike", backend_name)
    if alike and len(saved) == get_backend(backend_name).group().world_size:
        model.load_local_state_dict(saved[rank]["local"])
    else:
        model.load_state_dict(saved[0]["full"])
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(saved[0]["optimizer"]))
    return _steps(model, optimizer, rank, range(2, 4))


def plain_with_adam(world_size: list[int]) -> list[list[float]]:
    """Losses by step and rank of one process, whose number of ranks changes from step to step."""
    net = build(Net)
    optimizer = ADAM.make_optimizer(net)
    losses = []
    for step, ranks in enumerate(world_size):
        optimizer.zero_grad()
        values = torch.stack([loss_of(net, r, step) for r in range(ranks)])
        values.mean().backward()
        optimizer.step()
        losses.append(values.tolist())
    return losses


# ------------------------------------------------------------------ what a TPU would run
def on_native_collectives(rank: int, name: str) -> dict[str, Any]:
    """The program with the collectives of a TPU, without those that nobody needs the result of."""
    from shardkit.backends.xla.group import XlaGroup
    from shardkit.backends.xla.runtime import NativeCollectives, Replica, current_world
    from tests.xla import pending_program
    from tests.xla.meeting import in_memory

    world = current_world()
    assert world is not None
    backend = get_backend("xla")
    replica = Replica(rank, world.size, NativeCollectives(), in_memory(world.here()))
    group = XlaGroup(backend, replica, range(world.size))  # type: ignore[arg-type]
    model = CASES[name].model(backend.device(), group=group)
    backend.mark_step(wait=True)
    for step in range(2):
        loss = loss_of(model, rank, step)
        loss.backward()
        if step == 1:
            break
        model.zero_grad()
        backend.mark_step(wait=True)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    hlo = pending_program.hlo([loss, *gradients])
    found = _program(model, loss, 1)
    backend.mark_step(wait=True)
    return {**found, "barriers": hlo.count(" opt-barrier("), "loss": loss.item()}


RUNS = [(2, name) for name in CASES] + [(4, name) for name in ON_FOUR]


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_training_equals_one_process(world_size: int, name: str) -> None:
    tolerance = CASES[name].tolerance
    for result in rank_pool(world_size, "xla").run(train, world_size, name):
        for mine, one in result["losses"]:
            assert mine == pytest.approx(one, rel=tolerance, abs=tolerance)
        mine, one = result["states"]
        assert list(mine) == list(one)
        torch.testing.assert_close(mine, dict(one), rtol=10 * tolerance, atol=10 * tolerance)
        compiles = result["compiles"]
        # the first step makes optimizer state, the second is the steady state
        assert compiles[-2] == compiles[1], f"compiles after each step: {compiles}"
        assert result["collectives"] == result["expected"]


class Turns(nn.Module):
    """One of two layers, whichever turn it is, and another one; and one that nobody uses."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layers[self.turn](x))
        return out


def take_turns(rank: int, flatten: bool) -> None:
    """Each rank uses a layer of its own, but in one step."""
    case, backend, plain = Case(Turns, whole, options={"flatten": flatten}), get_backend("xla"), build(Turns)
    model = case.model(backend.device())
    optimizer, alone = case.make_optimizer(model), case.make_optimizer(plain)
    for step in range(STEPS):
        optimizer.zero_grad()
        alone.zero_grad()
        model.module.turn = rank if step != 1 else 0
        loss_of(model, rank, step).backward()
        for r in range(2):
            plain.turn = r if step != 1 else 0
            (loss_of(plain, r, step) / 2).backward()
        optimizer.step()
        alone.step()
        backend.mark_step(wait=True)
    state = model.state_dict()
    backend.mark_step()
    torch.testing.assert_close({k: v.cpu() for k, v in state.items()}, dict(plain.state_dict()))


def test_ranks_that_use_other_parameters() -> None:
    """Of one flat parameter that is right; of several of equal sizes, ranks would reduce one with another."""
    rank_pool(2, "xla").run(take_turns, True)
    with pytest.raises(RankFailedError, match=r"OutOfStepError: [\s\S]*gradients of parameters 2 of"):
        run_once(2, "xla", take_turns, False)


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
