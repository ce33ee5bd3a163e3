"""What a step may cost on the GPT of :mod:`tests.figures.gpt` with AdamW, asserted: OSS with ShardedDDP, and FSDP.

One unit a block, the root holds the rest. ``fsdp_keep`` is ``reshard_after_forward=False``. Everything here is counted,
so it holds on a busy machine too. ``python -m tests.figures.measure`` prints the figures.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import sharding_of
from tests.doors import through
from tests.figures.counters import CallCounter, OperationCounter, memory_of, quiet_collector
from tests.figures.gpt import (
    P,
    build,
    fsdp_peak,
    fsdp_resident,
    fsdp_sent,
    loss,
    theory_peak,
    theory_resident,
    theory_sent,
)
from tests.figures.implementations import ADAMW, IMPLEMENTATIONS
from tests.pools import rank_pool
from tests.started import output_of

MEASURED = {
    2: "bare,shardkit,balanced,fsdp,fsdp_keep,fully_shard,in_order,dtensors",
    4: "shardkit,balanced,fsdp,fsdp_keep,fully_shard,dtensors,torch_fsdp2",
}
OSS, FSDP = ("shardkit", "balanced"), ("fsdp", "fsdp_keep")
worlds = pytest.mark.parametrize("world_size", list(MEASURED))
_measured: dict[int, dict[str, Any]] = {}


def measured(world_size: int) -> dict[str, Any]:
    """The figures at that world size, of one run of the measuring program for all tests."""
    if world_size not in _measured:
        command = ["-m", "tests.figures.measure", "--world-size", str(world_size), "--extras"]
        command += ["--implementations", MEASURED[world_size]]
        _measured[world_size] = json.loads(output_of(*command).splitlines()[-1])
    return _measured[world_size]


def of(world_size: int, implementation: str, figure: str) -> list[Any]:
    """One figure on each rank."""
    if implementation == "bare":  # the same at every world size
        return [measured(2)["figures"]["bare"][0][figure]] * world_size
    return [rank[figure] for rank in measured(world_size)["figures"][implementation]]


def most(world_size: int, implementation: str, figure: str) -> float:
    return max(of(world_size, implementation, figure))


def mean(world_size: int, implementation: str, figure: str) -> float:
    return statistics.mean(of(world_size, implementation, figure))


def over_bare(world_size: int, implementation: str, figure: str) -> float:
    """How much more than without a wrapper, on the rank where it is the most."""
    return most(world_size, implementation, figure) - of(world_size, "bare", figure)[0]


def needs_wire(world_size: int) -> None:
    """Skips where the kernel can't count the bytes of these ranks alone."""
    why = measured(world_size)["no_wire"]
    if why:
        pytest.skip(f"no private network here ({why}), so other programs' bytes would be counted")


def times(factor: float, theory: Callable[[int], float]) -> dict[int, float]:
    return {world_size: factor * theory(world_size) for world_size in MEASURED}


# implementations, figure, of which rank, and at most how much on two and on four ranks
LIMITS: list[tuple[tuple[str, ...], str, Callable[[int, str, str], float], dict[int, float]]] = [
    # the root and the last block are gathered once; all is gathered once where nothing is freed after forward
    (("fsdp",), "sent", most, times(1.01, fsdp_sent)),
    (("fsdp_keep",), "sent", most, times(1.01, lambda world_size: fsdp_sent(world_size, reshard=False))),
    (FSDP, "resident", most, times(1.02, fsdp_resident)),
    (("fsdp",), "peak", most, {2: 1.08 * fsdp_peak(2)}),
    (FSDP, "operations", over_bare, {2: 250, 4: 250}),
    (FSDP, "calls", over_bare, {2: 1000, 4: 1000}),
    (FSDP, "calls", most, {2: 1042}),
    # others' gradients into what is sent, own shards into what is gathered, and the mean; the model's own 4 MB, too
    (FSDP, "moved", most, {2: 103e6, 4: 95e6}),
    (OSS, "moved", most, {2: 58e6}),  # of two ranks each packs the other's gradients alone
    (("dtensors",), "moved", most, {2: 150e6}),  # and sends from its shard, uncopied
    (OSS, "sent", mean, times(1.01, theory_sent)),
    (OSS, "sent", most, times(1.08, theory_sent)),
    (OSS, "resident", mean, times(1.03, theory_resident)),
    (OSS, "resident", most, {2: 1.08 * theory_resident(2)}),
    # fairscale's partition alone leaves 1.089 on a rank of four
    (("shardkit",), "resident", most, {4: 1.10 * theory_resident(4)}),
    (("balanced",), "resident", most, {2: 2.02 * P, 4: min(1.52 * P, 1.08 * theory_resident(4))}),
    (OSS, "peak", mean, times(1.15, theory_peak)),
    (OSS, "peak", most, {2: 3.00 * P}),
    (("shardkit",), "peak", most, {4: 1.22 * theory_peak(4)}),
    (("balanced",), "peak", most, {2: 2.80 * P, 4: min(2.30 * P, 1.15 * theory_peak(4))}),
    (OSS, "operations", over_bare, {2: 76, 4: 150}),
    (OSS, "operations", most, {2: 716, 4: 780}),
    (OSS, "calls", most, {2: 1000, 4: 1100}),
    (OSS, "calls", over_bare, {2: 600, 4: 600}),
    # files of this library's that a warm step goes through, those of the backend among them
    ((*OSS, *FSDP), "files", most, {2: 14, 4: 14}),
    (("fully_shard",), "files", most, {2: 12, 4: 12}),
    (("dtensors",), "files", most, {2: 15, 4: 15}),
    # ranges in traces cost nobody a call who does not trace
    (OSS + FSDP, "tracing", most, {2: 0, 4: 0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "figure", "of_ranks", "world_size", "limit"),
    [
        pytest.param(
            name, figure, of_ranks, world_size, limit, id=f"{name}{world_size} {of_ranks.__name__} {figure}"
        )
        for names, figure, of_ranks, limits in LIMITS
        for name in names
        for world_size, limit in limits.items()
    ],
)
def test_limits(
    implementation: str,
    figure: str,
    of_ranks: Callable[[int, str, str], float],
    world_size: int,
    limit: float,
) -> None:
    assert of_ranks(world_size, implementation, figure) <= limit


def test_theory_is_what_is_published_for_this_model() -> None:
    """In MB, at world size 2."""
    theory = (P, fsdp_sent(2), fsdp_resident(2), fsdp_peak(2))
    assert [round(x / 1e6, 1) for x in theory] == [55.4, 73.1, 83.1, 143.4]


def test_the_counters_find_what_one_process_needs() -> None:
    """Parameters and AdamW's moments between steps, gradients on top within one; nothing is sent."""
    assert of(2, "bare", "sent") == [0, 0]
    assert of(2, "bare", "resident") == pytest.approx([3 * P, 3 * P], rel=2e-3)
    assert of(2, "bare", "peak") == pytest.approx([4 * P, 4 * P], rel=2e-3)


@worlds
@pytest.mark.parametrize("implementation", OSS + FSDP)
def test_bytes_on_the_wire_of_a_step(world_size: int, implementation: str) -> None:
    """Headers of packets are all that comes on top."""
    needs_wire(world_size)
    wire = of(world_size, implementation, "wire")[0]
    if implementation in OSS:
        assert wire <= 1.01 * theory_sent(world_size)
    else:
        assert wire == pytest.approx(mean(world_size, implementation, "sent"), rel=0.01)


@worlds
@pytest.mark.parametrize("sizes", ["even", "uneven", "small"])
def test_bytes_on_the_wire_of_each_collective(world_size: int, sizes: str) -> None:
    """N (W-1)/W for a reduce-scatter and for an all-gather of N bytes."""
    needs_wire(world_size)
    for name, ratio in measured(world_size)["collectives"][sizes].items():
        assert 0.99 <= ratio <= (1.15 if sizes == "small" else 1.01), name


def test_peak_bytes_of_four_ranks_are_not_above_those_of_torch() -> None:
    """What is on its way between four ranks weighs more beside their smaller parts; torch's FSDP2 is the measure."""
    assert mean(4, "fsdp", "peak") <= mean(4, "torch_fsdp2", "peak")


# At most, of two and of four ranks: operations, Python calls of the main thread, resident and peak over P. In some
# steps a thread of gloo still holds what it sent when a unit is freed, and 130 calls look for views that modules keep.
DOORS = {
    "fsdp": {2: (730, 1042, 1.52, 2.80), 4: (785, 1310, 0.77, 1.95)},
    "fully_shard": {2: (765, 1400, 1.52, 2.80), 4: (835, 1550, 0.77, 1.95)},
    "dtensors": {2: (860, 2700, 1.52, 2.80), 4: (880, 2800, 0.77, 1.98)},
}


@worlds
@pytest.mark.parametrize("implementation", DOORS)
def test_a_unit_is_one_message_through_every_door(world_size: int, implementation: str) -> None:
    """Seven units: twelve gathers and seven reductions, each one exchange of two ranks.

    Of four ranks gloo makes a gather four broadcasts, and a reduction three exchanges, one with each other rank.
    """
    operations, calls, resident, peak = DOORS[implementation][world_size]
    issued = (
        {"alltoall_base_": 12 + 7} if world_size == 2 else {"broadcast_": 12 * 4, "alltoall_base_": 7 * 3}
    )
    assert of(world_size, implementation, "collectives") == [issued] * world_size
    assert most(world_size, implementation, "sent") <= 1.01 * fsdp_sent(world_size)
    assert most(world_size, implementation, "operations") <= operations
    assert most(world_size, implementation, "calls") <= calls
    assert most(world_size, implementation, "resident") <= resident * P
    assert most(world_size, implementation, "peak") <= peak * P
    needs_wire(world_size)
    assert most(world_size, implementation, "wire") <= 1.01 * fsdp_sent(world_size)


def test_a_fixed_order_of_sums_sends_and_holds_no_more() -> None:
    """Ranks' contributions to a unit's gradients are there beside what is sent, until they are added."""
    assert of(2, "in_order", "collectives") == [{"alltoall_base_": 12 + 7}] * 2
    assert most(2, "in_order", "sent") <= 1.01 * fsdp_sent(2)
    for figure in ("resident", "peak", "operations", "calls"):
        assert most(2, "in_order", figure) <= 1.2 * most(2, "fully_shard", figure)


class Mixed(nn.Module):
    """Trainable parameters of two dtypes, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fixed = (nn.Linear(200, 200) for _ in range(3))
        self.second.to(torch.bfloat16)
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.second(self.first(x).to(torch.bfloat16)).float())


def _mixed(rank: int, door: str) -> Counter[str]:
    model = through(door, nn.Sequential(Mixed(), Mixed(), Mixed()), "0", "1", "2")
    for _ in range(3):
        with OperationCounter(2) as counter:
            model(torch.ones(2, 200)).sum().backward()
    return counter.collectives


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
def test_a_unit_of_two_dtypes_is_a_message_for_each_in_each_direction(door: str) -> None:
    """Three units, all gathered twice but the last; what is frozen travels with what is trainable."""
    assert rank_pool(2).run(_mixed, door) == [{"alltoall_base_": 2 * (3 + 2) + 2 * 3}] * 2


def _updated(rank: int, implementation: str) -> tuple[int, set[str]]:
    """Python calls of a warm step of AdamW, and the functions of torch's DTensors that it and a backward call."""
    trainer = IMPLEMENTATIONS[implementation](build("gpt"))
    for step in range(3):
        with quiet_collector(), CallCounter() as calls:
            loss("gpt", trainer.model, step, rank, 16).backward()
        with quiet_collector(), CallCounter() as update:
            trainer.optimizer.step()
        trainer.zero_grad()
    found = {*calls.by_function, *update.by_function}
    return update.calls, {name for path, name in found if "/distributed/tensor/" in path}


def test_optimizers_do_not_pay_for_dtensors() -> None:
    """At most half of what AdamW takes over FSDP2's; no function of torch's DTensors is called in a step."""
    theirs, ours = (rank_pool(2).run(_updated, name) for name in ("torch_fsdp2", "dtensors"))
    for (calls, tensors), (most_calls, of_torch) in zip(ours, theirs, strict=True):
        assert calls <= most_calls / 2
        assert not tensors
        assert of_torch


def _adapted(rank: int, how: str) -> tuple[Counter[str], float]:
    """Messages of a step of LoRA, and by how much parameters then differ from those of one process, unfrozen in the
    middle, with two micro-batches a step of which the first is kept local."""
    world_size = torch.distributed.get_world_size()
    plain, model = build("lora"), IMPLEMENTATIONS[how](build("lora"))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    with torch.inference_mode():  # the memory of messages is made here, and used in training
        loss("lora", model.model, 0, rank)
    for step in range(4):
        if step == 2:
            for m in (plain, model.model):
                m.requires_grad_(True)
        with OperationCounter(world_size, least=0) as counter:
            for r in range(world_size):
                (loss("lora", plain, step, r) / world_size).backward()
            loss("lora", model.model, step, rank).backward()
        if step == 1:
            messages = counter.collectives
        with sharding_of(model.model).no_sync():
            loss("lora", model.model, step + 9, rank).backward()
        loss("lora", model.model, step + 9, rank).backward()
        for r in range(world_size):
            (2 * loss("lora", plain, step + 9, r) / world_size).backward()
        for each in (optimizer, model.optimizer):
            each.step()
            each.zero_grad()
    found = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.model.state_dict().items()}
    return messages, max((found[name] - p).abs().max().item() for name, p in plain.state_dict().items())


@pytest.mark.parametrize("implementation", DOORS)
def test_small_units_are_one_message_with_their_frozen_and_trainable_parameters(implementation: str) -> None:
    """Eight units: all together in forward, all but the last in backward, and reduced together."""
    for messages, difference in rank_pool(2).run(_adapted, implementation):
        assert messages == {"alltoall_base_": 1 + 1 + 1}
        assert difference <= 1e-5
    for _, difference in rank_pool(3).run(_adapted, implementation):
        assert difference <= 1e-5


@pytest.mark.parametrize("implementation", ["shardkit", "fsdp"])
def test_nothing_grows_over_fifty_steps(implementation: str) -> None:
    for rank in measured(2)["growth"][implementation]:
        assert rank["bytes"] == 0
        assert rank["objects"] <= 10


def test_what_counts_as_copied() -> None:
    a, b = torch.ones(256), torch.ones(256)
    with OperationCounter(1) as counter:
        a.copy_(b)
        torch._foreach_copy_([a[:128], a[128:]], [b[:128], b[128:]])
        a.mul_(2.0)
        torch.div(a, 2.0, out=b)
        torch.cat([a, b])
        torch.split_with_sizes_copy(a, [128, 128], out=[b[:128], b[128:]])
        assert counter.moved == 4 * (5 * 256 + 512)
        torch.add(a, b)
        a.view(2, 128).sum()
    assert counter.moved == 4 * (5 * 256 + 512)


def test_memory_counter_sees_other_threads_and_resized_storages() -> None:
    def step(held: list[torch.Tensor], count: int) -> None:
        held[0].untyped_storage().resize_(4 << 20)
        torch.empty(2 << 20)
        held[0].untyped_storage().resize_(1 << 20)

    memory = memory_of(lambda: [torch.empty(1 << 20)], step)
    assert memory.resident == pytest.approx(1 << 20, abs=4096)
    assert memory.peak == pytest.approx(12 << 20, abs=4096)
