"""Programs for OSS with ShardedDataParallel that are written down: each has one thing that a training loop does."""

from __future__ import annotations

from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    Fail,
    OptimizerSpec,
    Program,
    Reload,
    SetTrainable,
    Sharded,
    Step,
    Train,
    ZeroGrad,
    stack,
)

ITERATION: tuple[AnyStep, ...] = (ZeroGrad(), Train(), Step())
LATE = Sharded(late="frozen")


def _program(*steps: AnyStep, options: Sharded | None = None, optimizer: str = "momentum", layer: str = "linear",
             routing: str = "same") -> Program:  # fmt: skip
    model = stack("mlp", layer, dtype="float32")
    return Program(model, options or Sharded(), OptimizerSpec(optimizer), steps, routing=routing)


def _all(*iterations: tuple[AnyStep, ...]) -> tuple[AnyStep, ...]:
    return tuple(step for iteration in iterations for step in iteration)


FORMS = [
    ZeroGrad(target, to_none) for target in ("optimizer", "wrapper", "module") for to_none in (True, False)
]
ORDERS = (2.0, 1.0, float("inf"), 3.0)

PROGRAMS = {
    "steps": _program(*ITERATION * 3),
    "a tensor a bucket": _program(*ITERATION * 3, options=Sharded(reduce_buffer_size=0)),
    "small buckets": _program(*ITERATION * 3, options=Sharded(reduce_buffer_size=16)),
    "accumulated": _program(*(ZeroGrad("optimizer"), Train(), Train(), Train(), Step()) * 2),
    "no_sync": _program(
        *(ZeroGrad("module"), Train(no_sync=True), Train(no_sync=True), Train(), Step()),
        *(ZeroGrad("wrapper", False), Train(), Train(no_sync=True), Train(), Step()),  # a mean first
    ),
    "an error in no_sync": _program(*(Fail("no_sync"), *ITERATION) * 2),
    "two forwards": _program(*(ZeroGrad(), Train("two"), Step()) * 2),
    "backward twice": _program(*(ZeroGrad(), Train("twice"), Step()) * 2),
    "discarded": _program(*_all(*((Train(), form, Train(), Step()) for form in FORMS if form.set_to_none))),
    "zero_grad in every form": _program(*_all(*((form, Train(), Step()) for form in FORMS))),
    "clipped": _program(*_all(*((ZeroGrad(), Train(), Clip(0.05, order), Step()) for order in ORDERS))),
    "frozen and thawed": _program(
        *(*ITERATION, ZeroGrad(), SetTrainable((0,), False, "weight"), Train(), Step()),
        *(ZeroGrad(), SetTrainable((0,), True, "weight"), Train(), Step()),
    ),
    "a group that is added": _program(*ITERATION, ZeroGrad("module"), AddGroup(), Train(), Step(), options=LATE),
    "reloaded": _program(*ITERATION, Reload(), *ITERATION),
    # its weight decay tells a parameter without a gradient from one whose gradient is zero
    "other branches on each rank": _program(
        *ITERATION * 4, layer="branch", routing="by_rank"
    ),
    "another branch in each step": _program(*ITERATION * 3, layer="branch"),
    "a layer that is never used": _program(*ITERATION * 2, layer="unused"),
    "tied": _program(*ITERATION * 2, layer="tied"),
    "an optimizer that needs whole parameters": _program(*ITERATION * 2, optimizer="adafactor"),
}  # fmt: skip
BUFFERS = Program(
    stack("batch_norm", "running_mean", dtype="float32"),
    Sharded(),
    steps=(*ITERATION, Evaluate(only_rank_0=True)) * 3,
)
FEWER_PARAMETERS_THAN_RANKS = Program(stack(), Sharded(), steps=ITERATION * 2)
