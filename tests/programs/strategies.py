"""Hypothesis strategies that draw programs.

A program is a run of phases that a training loop could have; what plain torch gives no meaning to is filtered by
:mod:`tests.programs.legality`.
"""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from .legality import meaningful, refused
from .optimizers import OPTIMIZERS
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    FailInBackward,
    FailInNoSync,
    ModelSpec,
    OptimizerSpec,
    Options,
    Program,
    Reload,
    Save,
    Schedule,
    SetTrainable,
    Step,
    Train,
    ZeroGrad,
)

PLAIN_BLOCKS = ("linear", "no_bias", "norm", "mlp", "dropout", "frozen", "odd", "conv", "batch_norm", "running_mean",
                "embedding", "tied", "attention", "checkpoint")  # fmt: skip
RARE_BLOCKS = ("branch", "unused", "empty", "sparse", "mixed_dtype", "checkpoint_reentrant")
DENSE_OPTIMIZERS = tuple(n for n, c in OPTIMIZERS.items() if c.sparse != "must" and c.smooth)
SPARSE_OPTIMIZERS = tuple(n for n, c in OPTIMIZERS.items() if c.sparse == "may")


def models(blocks: tuple[str, ...], dtype: str = "float64") -> st.SearchStrategy[ModelSpec]:
    names = st.lists(st.sampled_from(blocks), min_size=1, max_size=4).map(tuple)
    return st.builds(ModelSpec, names, st.sampled_from([4, 3, 6]), st.just(dtype), st.integers(0, 50))


@st.composite
def optimizers(draw: st.DrawFn, model: ModelSpec, names: tuple[str, ...], plain: bool) -> OptimizerSpec:
    if "sparse" in model.blocks:
        names = SPARSE_OPTIMIZERS
    forms = (
        ["parameters", "groups"]
        if plain
        else ["parameters", "groups", "named", "named_groups", "empty_group"]
    )
    schedulers = ["", "", "step", "cosine", "lambda"]
    name = draw(st.sampled_from(names))
    if not plain and OPTIMIZERS[name].arguments.get("momentum"):
        schedulers += ["one_cycle", "cyclic"]
    return OptimizerSpec(
        name,
        draw(st.sampled_from([0.05, 0.01])),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(forms)),
        draw(st.sampled_from(schedulers)),
    )


def _zero_grads(plain: bool) -> st.SearchStrategy[ZeroGrad]:
    if plain:
        return st.builds(ZeroGrad, st.just("wrapper"), st.booleans())
    return st.builds(ZeroGrad, st.sampled_from(["wrapper", "optimizer", "module"]), st.booleans())


@st.composite
def iterations(draw: st.DrawFn, plain: bool, once: bool = False) -> list[AnyStep]:
    """One pass of a training loop: clear, accumulate, reduce, maybe clip, step."""
    steps: list[AnyStep] = []
    if plain or draw(st.integers(0, 3)):
        steps.append(draw(_zero_grads(plain)))
    modes = st.sampled_from(
        ["once"] if once else ["once", "once", "sum"] if plain else ["once", "once", "two", "sum", "twice"]
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        if not plain and draw(st.integers(0, 5)) == 0:
            steps.append(FailInNoSync())
        steps.append(Train(draw(modes), no_sync=True))
    steps.append(Train(draw(modes)))
    if not plain and draw(st.integers(0, 3)) == 0:
        steps.append(Train(draw(modes)))  # accumulates without no_sync
    if draw(st.integers(0, 3)) == 0:
        steps.append(
            Clip(draw(st.sampled_from([0.3, 100.0])), draw(st.sampled_from([2.0, 1.0, float("inf")])))
        )
    steps.append(Step())
    if draw(st.integers(0, 3)) == 0:
        steps.append(Schedule())
    return steps


@st.composite
def interludes(draw: st.DrawFn, model: ModelSpec, options: Options, plain: bool) -> list[AnyStep]:
    """What happens between passes."""
    kinds = ["save", "reload", "closure"] if plain else [
        "evaluate", "evaluate_0", "save", "reload", "trainable", "fail", "late", "closure"]  # fmt: skip
    kind = draw(st.sampled_from(kinds))
    if kind in ("evaluate", "evaluate_0"):
        return [Evaluate(kind == "evaluate_0")]
    if kind == "save":
        return [Save(draw(st.sampled_from([-1, 0])))]
    if kind == "reload":
        return [Reload()]
    if kind == "trainable":
        blocks = st.integers(0, len(model.blocks) - (2 if options.late else 1))
        if options.late and len(model.blocks) == 1:
            return []
        return [ZeroGrad("module", True), SetTrainable(draw(blocks), draw(st.booleans()))]
    if kind == "fail":
        return [FailInBackward()]
    if kind == "late":
        return [ZeroGrad("module", True), AddGroup()] if options.late else []
    if options.optimizers > 1:
        return []
    return [ZeroGrad("wrapper", True), Step(closure=True), ZeroGrad("wrapper", True)]


def _once(steps: list[AnyStep]) -> tuple[AnyStep, ...]:
    """The late group can be added only once."""
    seen = False
    kept: list[AnyStep] = []
    for step in steps:
        if isinstance(step, AddGroup):
            if seen:
                continue
            seen = True
        kept.append(step)
    return tuple(kept)


@st.composite
def programs(
    draw: st.DrawFn,
    plain: bool = False,
    blocks: tuple[str, ...] | None = None,
    optimizer_names: tuple[str, ...] = DENSE_OPTIMIZERS,
    dtype: str = "float64",
    wrapper: str = "sharded",
    partition: str = "",
) -> Program:
    """A whole program; ``plain`` keeps to what fairscale mostly does right."""
    if blocks is None:
        blocks = PLAIN_BLOCKS if plain else (*PLAIN_BLOCKS, *RARE_BLOCKS, *RARE_BLOCKS)
    model = draw(models(blocks, dtype))
    optimizer = draw(optimizers(model, optimizer_names, plain))
    late = "" if plain or optimizer.scheduler else draw(st.sampled_from(["", "", "frozen", "trainable"]))
    options = Options(
        broadcast_buffers=draw(st.booleans()),
        reduce_buffer_size=draw(st.sampled_from([2**23, 0, 16])),
        optimizers=draw(st.sampled_from([1, 1, 2])),
        late=late,
        partition=partition,
        wrapper=wrapper,
    )
    steps: list[AnyStep] = []
    for _ in range(draw(st.integers(1, 3))):
        steps += draw(iterations(plain, wrapper == "ddp"))
        if draw(st.booleans()):
            steps += draw(interludes(model, options, plain))
    program = Program(
        model,
        optimizer,
        options,
        _once(steps),
        draw(st.integers(0, 20)),
        "same" if plain else draw(st.sampled_from(["same", "by_rank", "rank_0"])),
    )
    assume(meaningful(program) and not refused(program))
    return program
