"""Hypothesis strategies that draw programs: a model with units in it, options, and a run of training phases.

What plain torch gives no meaning to is filtered by :mod:`tests.fsdp_programs.legality`.
"""

from __future__ import annotations

import dataclasses

from hypothesis import assume
from hypothesis import strategies as st

from tests.programs.spec import Clip, OptimizerSpec, Step, Train, ZeroGrad

from .legality import COUNTING, STEPLESS, UNEVENLY_USED, Ledger, meaningful
from .models import COMPOSITES
from .spec import (
    AnyStep,
    Evaluate,
    Fail,
    Inspect,
    Look,
    ModelSpec,
    Node,
    Options,
    Path,
    Peek,
    Program,
    Reload,
    SetTrainable,
    Summon,
)

# Half precision may round what one process rounds, too: nothing here divides by small numbers.
STEADY_LEAVES = ("linear", "no_bias", "mlp", "embedding", "odd", "tied", "frozen", "shared")
LEAVES = ("linear", "no_bias", "norm", "mlp", "dropout", "frozen", "odd", "conv", "batch_norm", "running_mean",
          "embedding", "tied", "attention", "checkpoint", "shared", "shared")  # fmt: skip
RARE_LEAVES = ("branch", "unused", "empty", "mixed_dtype", "checkpoint_reentrant")
PEEKS = ("print", "sum", "clone", "lerp", "numpy", "write", "copy")
PLAIN_COMPOSITES = ("chain", "residual", "twice", "tuple", "dict")


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Options of a whole model that change nothing about results."""
    rarely = st.sampled_from([False, False, False, True])
    return Options(
        flatten_parameters=draw(st.sampled_from([True, True, False])),
        reshard_after_forward=draw(st.sampled_from([True, True, False])),
        disable_reshard_on_root=draw(st.booleans()),
        bucket_cap_mb=draw(st.sampled_from([25, 0, 0.0001])),
        gradient_predivide_factor=draw(st.sampled_from([None, None, 1.0, 2.0])),
        move_params_to_cpu=draw(rarely),
        state_dict_on_rank_0_only=draw(rarely),
        clear_autocast_cache=draw(rarely),
    )


@st.composite
def low_precision(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> Options:
    """Options of a model that computes in half precision."""
    dtype = draw(st.sampled_from(dtypes))
    return Options(
        mixed_precision=True,
        compute_dtype="" if dtype == "float16" else dtype,
        buffer_dtype=draw(st.sampled_from(["", "float32"])),
        fp32_reduce_scatter=draw(st.booleans()),
        flatten_parameters=draw(st.sampled_from([True, True, False])),
        reshard_after_forward=draw(st.booleans()),
        move_params_to_cpu=draw(st.sampled_from([False, False, True])),
        gradient_predivide_factor=draw(st.sampled_from([None, 1.0])),
    )


@st.composite
def units(draw: st.DrawFn, root: Options) -> Options | None:
    """Nothing, or a unit's own options: what may differ between the units of a model."""
    if not draw(st.integers(0, 2)):
        return None
    root = dataclasses.replace(root, state_dict_on_rank_0_only=False)
    if draw(st.integers(0, 2)):
        return root
    return dataclasses.replace(
        root, flatten_parameters=draw(st.booleans()), reshard_after_forward=draw(st.booleans())
    )


@st.composite
def nodes(
    draw: st.DrawFn, root: Options, leaves: tuple[str, ...], composites: tuple[str, ...], depth: int
) -> Node:
    if depth and draw(st.integers(0, 2)) == 0:
        inner = st.lists(nodes(root, leaves, composites, depth - 1), min_size=1, max_size=2)
        return Node(draw(st.sampled_from(composites)), tuple(draw(inner)), draw(units(root)))
    frozen = draw(st.sampled_from(["", "", "", "", "all", "weight", "bias"]))
    return Node(draw(st.sampled_from(leaves)), (), draw(units(root)), frozen)


@st.composite
def models(
    draw: st.DrawFn, root: Options, plain: bool, dtype: str, leaves: tuple[str, ...] = ()
) -> ModelSpec:
    """A model with units; ``plain`` keeps to what fairscale mostly does right."""
    leaves = leaves or (LEAVES if plain else (*LEAVES, *RARE_LEAVES))
    composites = PLAIN_COMPOSITES if plain else tuple(COMPOSITES)
    drawn = draw(st.lists(nodes(root, leaves, composites, 2), min_size=1, max_size=3))
    if not plain and draw(st.integers(0, 3)) == 0:  # a weight in two places, maybe of two units
        drawn = [Node("shared", (), draw(units(root))), *drawn, Node("shared", (), draw(units(root)))]
    head_frozen = not plain and draw(st.integers(0, 9)) == 0
    if head_frozen:  # something has to be trainable
        drawn.insert(0, Node("linear", (), draw(units(root))))
    return ModelSpec(
        tuple(drawn), draw(st.sampled_from([4, 3])), dtype, draw(st.integers(0, 50)), head_frozen
    )


# ------------------------------------------------------------------------------------ steps
def modes(kinds: set[str], plain: bool = False) -> st.SearchStrategy[str]:
    """Modes of training steps that modules of these kinds allow."""
    found = ["once", "once", "sum"] if plain else ["once", "once", "two", "sum", "twice"]
    ledger = Ledger(kinds)
    return st.sampled_from([mode for mode in found if ledger.allows(Train(mode))])


def zero_grads(plain: bool = False) -> st.SearchStrategy[ZeroGrad]:
    return st.builds(
        ZeroGrad, st.sampled_from(["wrapper", "optimizer"]), st.just(True) if plain else st.booleans()
    )


def clips() -> st.SearchStrategy[Clip]:
    return st.builds(Clip, st.sampled_from([0.3, 100.0]), st.sampled_from([2.0, 1.0, float("inf")]))


def evaluations() -> st.SearchStrategy[Evaluate]:
    return st.builds(Evaluate, st.sampled_from(["no_grad", "inference", "dropped"]))


def reloads(optimizers: tuple[str, ...] = ("full", "local")) -> st.SearchStrategy[Reload]:
    return st.builds(
        Reload, st.sampled_from(["full", "local", "consolidated"]), st.sampled_from(list(optimizers))
    )


def freezings(model: ModelSpec) -> st.SearchStrategy[SetTrainable]:
    paths: list[Path] = [path for path, _ in model.walk()]
    names = st.sampled_from(["all", "all", "weight", "bias"])
    return st.builds(SetTrainable, st.sampled_from(paths), st.booleans(), names)


@st.composite
def iterations(draw: st.DrawFn, kinds: set[str], plain: bool) -> list[AnyStep]:
    """One pass of a training loop: clear, accumulate, reduce, maybe clip, step."""
    steps: list[AnyStep] = []
    mode = modes(kinds, plain)
    if plain or draw(st.integers(0, 3)):
        steps.append(draw(zero_grads(plain)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        steps.append(Train(draw(mode), no_sync=True))
    if not plain and steps and draw(st.integers(0, 5)) == 0:
        steps.append(ZeroGrad(draw(st.sampled_from(["wrapper", "optimizer"])), True))  # thrown away
    steps.append(Train(draw(mode)))
    if draw(st.integers(0, 3)) == 0:
        steps.append(Train(draw(mode)))  # accumulates without no_sync
    if draw(st.integers(0, 3)) == 0:
        steps.append(draw(clips()))
    steps.append(Step(closure=not draw(st.integers(0, 4))))
    if draw(st.booleans()):
        steps.append(Look())
    return steps


@st.composite
def interludes(draw: st.DrawFn, root: Options, model: ModelSpec, plain: bool) -> list[AnyStep]:
    """What happens between passes."""
    kinds = ["evaluate", "summon", "reload", "inspect"] if plain else [
        "evaluate", "summon", "reload", "freeze", "fail", "inspect", "peek"]  # fmt: skip
    kind = draw(st.sampled_from(kinds))
    if kind == "evaluate":
        return [draw(evaluations())]
    if kind == "summon":
        write = draw(st.booleans())
        return [Summon(write, not write and draw(st.booleans()))]
    # fairscale gathers an optimizer's state only where all is flattened
    flat = not plain or all(
        o.flatten_parameters for o in (root, *(n.unit for _, n in model.walk() if n.unit))
    )
    if kind == "reload":
        return [draw(reloads(("full", "local") if flat else ("local",)))]
    if kind == "inspect":
        return [Inspect(flat)]
    if kind == "peek":
        return [Peek(draw(st.sampled_from(PEEKS)))]
    if kind == "freeze":
        return [ZeroGrad("wrapper", True), draw(freezings(model))]
    return [Fail(draw(st.sampled_from(["forward", "backward", "no_sync"])))]


@st.composite
def programs(
    draw: st.DrawFn,
    plain: bool = False,
    dtype: str = "float64",
    low: tuple[str, ...] = (),
) -> Program:
    """A whole program; ``plain`` keeps to what fairscale mostly does right, ``low`` are dtypes of mixed precision."""
    root = draw(low_precision(low) if low else options())
    model = draw(models(root, plain or bool(low), dtype, STEADY_LEAVES if low else ()))
    steps: list[AnyStep] = []
    for _ in range(draw(st.integers(1, 3))):
        steps += draw(iterations(model.kinds, plain))
        if draw(st.booleans()):
            steps += draw(interludes(root, model, plain))
    routing = "same" if plain else draw(st.sampled_from(["same", "by_rank", "rank_0"]))
    even = not model.kinds & UNEVENLY_USED and not any(isinstance(s, SetTrainable) for s in steps)
    names = ("sgd", "momentum") if low else (*STEPLESS, *COUNTING) if even else STEPLESS
    optimizer = OptimizerSpec(draw(st.sampled_from(names)), 0.01 if low else 0.05)
    program = Program(model, root, optimizer, (*steps, Look()), draw(st.integers(0, 20)), routing)
    assume(meaningful(program))
    return program
