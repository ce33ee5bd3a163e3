"""What may go wrong between ranks, as a table: tests run it, and docs/RELIABILITY.md is made from it."""

from __future__ import annotations

from typing import NamedTuple

SHARDKIT = ("fsdp", "sharded_ddp")
OTHERS = ("ddp", "fsdp2")  # torch's, for comparison
SOON = 10.0  # seconds after which every rank is to have heard of it, and what the machine has lost of them
LATEST = 60.0  # from then on a rank hangs


class Case(NamedTuple):
    """One way to lose each other.

    Attributes:
        name: identifier; unique.
        description: what happens, in a sentence without a subject.
        program: a function of :mod:`tests.faults.programs`, called with (rank, trainer) after a first step.
        world_size: number of ranks.
        errors: for each rank the names of the errors one of which it may end with; "" for none at all.
        strategies: what of :data:`SHARDKIT` it is tried with.
        words: what has to be in the text of every rank's error.
        compared: whether it makes sense with torch's own wrappers.
        timeout: of the process group, in seconds; None: torch's default.
        begins: with a first step; else there is no trainer, and the program is given the strategy's name.
    """

    name: str
    description: str
    program: str
    world_size: int
    errors: tuple[tuple[str, ...], ...]
    strategies: tuple[str, ...] = SHARDKIT
    words: tuple[str, ...] = ()
    compared: bool = True
    timeout: float | None = None
    begins: bool = True


# how a rank may end
OUT = ("OutOfStepError",)
LOST = ("RankLostError",)
GONE = ("killed",)  # it was ended from outside, and hears of nothing

STAYS = ("hangs",)  # it lives on and does nothing, as the case wants it
FINE = ("",)


def _parted(name: str, description: str, program: str, *words: str) -> Case:
    """Two ranks that do different things, and both hear of it, with a call of shardkit's in a channel."""
    return Case(name, description, program, 2, (OUT, OUT), words=("rank 0", "rank 1", *words, "channel"))


CASES = [
    _parted(
        "uneven batches, then a collective",
        "rank 1 has one batch more than rank 0, which goes on to collect state",
        "uneven_then_collective",
    ),
    _parted(
        "uneven batches, then a barrier",
        "rank 1 has one batch more than rank 0, which goes on to torch.distributed.barrier",
        "uneven_then_barrier", "barrier",
    ),
    _parted(
        "a skipped batch",
        "rank 0 skips a batch; at the end all meet in a barrier",
        "skipped_batch", "barrier",
    ),
    _parted(
        "a skipped backward",
        "rank 0 skips a backward and a step; at the end all meet in a barrier",
        "skipped_backward",
    ),
    _parted(
        "no_sync on one rank",
        "rank 0 runs a backward under no_sync, rank 1 without; then all meet in a barrier",
        "no_sync_on_one",
    ),
    _parted(
        "a collective of another library",
        "rank 0 is in an all-reduce of another library's group, rank 1 in a step",
        "another_library", "all_reduce",
    ),
    Case(
        "a work of torch's",
        "rank 0 waits itself for an all-reduce that it has issued asynchronously, rank 1 is in a step",
        "work_of_torch", 2, (("RuntimeError",), OUT),
    ),
    Case(
        "another order",
        "rank 0 calls two equal blocks in the opposite order",
        "other_order", 2, (OUT, OUT), ("fsdp",), ("rank 0", "rank 1", "parameters 0 of a", "parameters 0 of b"),
    ),
    Case(
        "another order in evaluation",
        "rank 0 calls two equal blocks in the opposite order, under no_grad",
        "other_order_in_evaluation", 2, (OUT, OUT), ("fsdp",),
        ("rank 0", "rank 1", "parameters 0 of a", "parameters 0 of b"),
    ),
    _parted(
        "state of one rank",
        "rank 0 alone asks for the state of all ranks; rank 1 goes on to the next step",
        "parameters_on_one",
    ),
    _parted(
        "an error that is swallowed",
        "rank 0 raises in its backward, swallows the error and goes on with the next batch",
        "swallowed_and_on", "raised",
    ),
    _parted(
        "an error in the loss that is swallowed",
        "rank 0 raises when it computes its loss, swallows the error and goes on with the next batch",
        "raises_in_loss",
    ),
    _parted(
        "an error before the optimizer that is swallowed",
        "rank 0 raises between backward and step, swallows the error and goes on with the next batch",
        "raises_before_step",
    ),
    Case(
        "an error in forward, and silence",
        "rank 0 raises in its forward, swallows the error and sleeps",
        "raises_in_forward", 2, (STAYS, OUT), words=("rank 0", "boom"),
    ),
    Case(
        "an error in backward, and silence",
        "rank 0 raises in its backward, swallows the error and sleeps",
        "raises_in_backward", 2, (STAYS, OUT), words=("rank 0", "raised"),
    ),
    Case(
        "an error between forward and backward, and silence",
        "rank 0 raises when it computes its loss, and sleeps while it handles the error",
        "raises_between", 2, (STAYS, OUT), words=("rank 0", "boom"),
    ),
    Case(
        "an error of shardkit's, and silence",
        "rank 0 calls what is refused, swallows the error and sleeps",
        "raises_of_shardkit", 2, (STAYS, OUT), words=("rank 0", "raised", "Error"), compared=False,
    ),
    Case(
        "an error in the optimizer, and silence",
        "rank 0 raises in its optimizer's step, swallows the error and sleeps",
        "raises_in_step", 2, (STAYS, OUT), ("sharded_ddp",), ("rank 0", "raised", "boom"), compared=False,
    ),
    Case(
        "an error at construction, and silence",
        "rank 0's very first wrapper is refused; it swallows the error and sleeps",
        "raises_at_construction", 2, (STAYS, OUT), words=("rank 0", "raised ConfigurationError"), compared=False,
        begins=False,
    ),
    Case(
        "an error that ends a thread",
        "rank 0 trains in a thread, which ends with an error",
        "raises_in_thread", 2, (STAYS, OUT), words=("rank 0", "boom"), compared=False,
    ),
    Case("killed", "rank 1 is killed (SIGKILL) between two steps", "killed", 3, (LOST, GONE, LOST)),
    Case(
        "killed, one of four",
        "rank 1 of 4 is killed (SIGKILL) between two steps",
        "killed", 4, (LOST, GONE, LOST, LOST),
    ),
    Case("connections reset", "rank 1 ends, and resets its connections", "reset", 2, (LOST, GONE)),
    Case("slow", "rank 0 computes, loads data or compiles for 9 s", "slow", 2, (FINE, FINE)),
    Case(
        "slow in a handler",
        "rank 0 handles an error between two steps, and needs 9 s for it",
        "slow_in_a_handler", 2, (FINE, FINE),
    ),
    Case(
        "slow group of others",
        "ranks 0 and 2 meet in a barrier of their own, to which rank 2 comes after 9 s",
        "slow_group_of_others", 3, (FINE, FINE, FINE),
    ),
    Case(
        "stopped",
        "rank 1 of 3 is stopped (SIGSTOP) between two steps; the process group's timeout is 6 s",
        "stopped", 3, (LOST, STAYS, LOST), words=("timeout",), timeout=6.0,
    ),
]  # fmt: skip


def find(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
