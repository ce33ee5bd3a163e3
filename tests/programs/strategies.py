"""Hypothesis strategies that draw programs: a model, how it is sharded, and phases that a training loop could have.

What plain torch gives no meaning to is filtered by :mod:`tests.programs.legality`.
"""

from __future__ import annotations

import dataclasses

from hypothesis import assume
from hypothesis import strategies as st

from .legality import UNEVENLY_USED, Ledger, meaningful
from .models import COMPOSITES
from .optimizers import COUNTING, OPTIMIZERS, STEPLESS
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    Fail,
    Inspect,
    Look,
    ModelSpec,
    Node,
    OptimizerSpec,
    Path,
    Peek,
    Program,
    Reload,
    Save,
    Schedule,
    SetTrainable,
    Sharded,
    Step,
    Summon,
    Train,
    Unit,
    ZeroGrad,
)

PLAIN_LEAVES = ("linear", "no_bias", "norm", "mlp", "dropout", "frozen", "odd", "conv", "batch_norm", "running_mean",
                "embedding", "tied", "attention", "checkpoint")  # fmt: skip
RARE_LEAVES = ("branch", "unused", "empty", "mixed_dtype", "checkpoint_reentrant")
# Half precision may round what one process rounds, too: nothing here divides by small numbers.
STEADY_LEAVES = ("linear", "no_bias", "mlp", "embedding", "odd", "tied", "frozen", "shared")
PLAIN_COMPOSITES = ("chain", "residual", "twice", "tuple", "dict")
DENSE_OPTIMIZERS = tuple(n for n, c in OPTIMIZERS.items() if c.sparse != "must" and c.smooth)
SPARSE_OPTIMIZERS = tuple(n for n, c in OPTIMIZERS.items() if c.sparse == "may")
PEEKS = ("print", "sum", "clone", "lerp", "numpy", "write", "copy")
RARELY = st.sampled_from([False, False, False, True])
ROUTINGS = st.sampled_from(["same", "by_rank", "rank_0"])


# ------------------------------------------------------------------------------------------------ options
@st.composite
def unit_options(draw: st.DrawFn, plain: bool = True) -> Unit:
    """Options of a whole FSDP model that change nothing about results."""
    return Unit(
        flatten_parameters=draw(st.sampled_from([True, True, False])),
        reshard_after_forward=draw(st.sampled_from([True, True, False])),
        disable_reshard_on_root=draw(st.booleans()),
        bucket_cap_mb=draw(st.sampled_from([25, 0, 0.0001])),
        gradient_predivide_factor=draw(st.sampled_from([None, None, 1.0, 2.0])),
        move_params_to_cpu=draw(RARELY),
        state_dict_on_rank_0_only=draw(RARELY),
        clear_autocast_cache=draw(RARELY),
        align=None if plain else draw(st.sampled_from([None, None, "parameters", "rows", 4])),
    )


@st.composite
def low_precision(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> Unit:
    """Options of an FSDP model that computes in half precision."""
    dtype = draw(st.sampled_from(dtypes))
    return Unit(
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
def inner_units(draw: st.DrawFn, root: Unit) -> Unit | None:
    """Nothing, or a unit's own options: what may differ between the units of a model."""
    if not draw(st.integers(0, 2)):
        return None
    root = dataclasses.replace(root, state_dict_on_rank_0_only=False)
    if draw(st.integers(0, 2)):
        return root
    return dataclasses.replace(
        root, flatten_parameters=draw(st.booleans()), reshard_after_forward=draw(st.booleans())
    )


# ------------------------------------------------------------------------------------------------ models
def stacks(leaves: tuple[str, ...], dtype: str = "float64") -> st.SearchStrategy[ModelSpec]:
    """Leaves in a row, for OSS."""
    nodes = st.lists(st.builds(Node, st.sampled_from(leaves)), min_size=1, max_size=4).map(tuple)
    return st.builds(ModelSpec, nodes, st.sampled_from([4, 3, 6]), st.just(dtype), st.integers(0, 50))


@st.composite
def nodes(
    draw: st.DrawFn, root: Unit, leaves: tuple[str, ...], composites: tuple[str, ...], depth: int
) -> Node:
    if depth and draw(st.integers(0, 2)) == 0:
        inner = st.lists(nodes(root, leaves, composites, depth - 1), min_size=1, max_size=2)
        return Node(draw(st.sampled_from(composites)), tuple(draw(inner)), draw(inner_units(root)))
    frozen = draw(st.sampled_from(["", "", "", "", "all", "weight", "bias"]))
    return Node(draw(st.sampled_from(leaves)), (), draw(inner_units(root)), frozen)


@st.composite
def trees(draw: st.DrawFn, root: Unit, plain: bool, dtype: str, leaves: tuple[str, ...] = ()) -> ModelSpec:
    """A model with FSDP units; ``plain`` keeps to what fairscale mostly does right."""
    leaves = leaves or (*PLAIN_LEAVES, "shared", "shared", *(() if plain else RARE_LEAVES))
    composites = PLAIN_COMPOSITES if plain else tuple(COMPOSITES)
    drawn = draw(st.lists(nodes(root, leaves, composites, 2), min_size=1, max_size=3))
    if not plain and draw(st.integers(0, 3)) == 0:  # a weight in two places, maybe of two units
        drawn = [
            Node("shared", (), draw(inner_units(root))),
            *drawn,
            Node("shared", (), draw(inner_units(root))),
        ]
    head_frozen = not plain and draw(st.integers(0, 9)) == 0
    if head_frozen:  # something has to be trainable
        drawn.insert(0, Node("linear", (), draw(inner_units(root))))
    return ModelSpec(
        tuple(drawn), draw(st.sampled_from([4, 3])), dtype, draw(st.integers(0, 50)), head_frozen
    )


@st.composite
def optimizers(draw: st.DrawFn, model: ModelSpec, names: tuple[str, ...], plain: bool) -> OptimizerSpec:
    """Of OSS."""
    names = SPARSE_OPTIMIZERS if "sparse" in model.kinds else names
    forms = ["parameters", "groups", *([] if plain else ["named", "named_groups", "empty_group"])]
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


# ------------------------------------------------------------------------------------------------ steps
def modes(kinds: set[str], options: Unit | Sharded, plain: bool = False) -> st.SearchStrategy[str]:
    """Modes of training steps that modules of these kinds allow."""
    if isinstance(options, Sharded) and options.wrapper == "ddp":
        return st.just("once")
    found = ["once", "once", "sum"] if plain else ["once", "once", "two", "sum", "twice"]
    ledger = Ledger(kinds, options)
    return st.sampled_from([mode for mode in found if ledger.allows(Train(mode))])


def zero_grads(options: Unit | Sharded, plain: bool = False) -> st.SearchStrategy[ZeroGrad]:
    if isinstance(options, Sharded):
        targets = ["wrapper"] if plain else ["wrapper", "optimizer", "module"]
        return st.builds(ZeroGrad, st.sampled_from(targets), st.booleans())
    return st.builds(
        ZeroGrad, st.sampled_from(["wrapper", "optimizer"]), st.just(True) if plain else st.booleans()
    )


def clips() -> st.SearchStrategy[Clip]:
    return st.builds(Clip, st.sampled_from([0.3, 100.0]), st.sampled_from([2.0, 1.0, float("inf")]))


def evaluations() -> st.SearchStrategy[Evaluate]:
    return st.builds(Evaluate, st.sampled_from(["no_grad", "inference", "dropped"]))


def reloads(optimizers: tuple[str, ...] = ("full", "local")) -> st.SearchStrategy[Reload]:
    return st.builds(Reload, st.sampled_from(["full", "local", "consolidated"]), st.sampled_from(optimizers))


def freezings(model: ModelSpec) -> st.SearchStrategy[SetTrainable]:
    paths: list[Path] = [path for path, _ in model.walk()]
    names = st.sampled_from(["all", "all", "weight", "bias"])
    return st.builds(SetTrainable, st.sampled_from(paths), st.booleans(), names)


@st.composite
def iterations(draw: st.DrawFn, kinds: set[str], options: Unit | Sharded, plain: bool) -> list[AnyStep]:
    """One pass of a training loop: clear, accumulate, reduce, maybe clip, step."""
    steps: list[AnyStep] = []
    units, mode = isinstance(options, Unit), modes(kinds, options, plain)
    if plain or draw(st.integers(0, 3)):
        steps.append(draw(zero_grads(options, plain)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        if not units and not plain and draw(st.integers(0, 5)) == 0:
            steps.append(Fail("no_sync"))
        steps.append(Train(draw(mode), no_sync=True))
    if units and not plain and steps and draw(st.integers(0, 5)) == 0:
        steps.append(ZeroGrad(draw(st.sampled_from(["wrapper", "optimizer"])), True))  # thrown away
    steps.append(Train(draw(mode)))
    if (units or not plain) and draw(st.integers(0, 3)) == 0:
        steps.append(Train(draw(mode)))  # accumulates without no_sync
    if draw(st.integers(0, 3)) == 0:
        steps.append(draw(clips()))
    steps.append(Step(closure=units and not draw(st.integers(0, 4))))
    if draw(st.integers(0, 3)) < (2 if units else 1):
        steps.append(Look() if units else Schedule())
    return steps


@st.composite
def unit_interludes(draw: st.DrawFn, root: Unit, model: ModelSpec, plain: bool) -> list[AnyStep]:
    """What happens between passes of FSDP."""
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
def moves(draw: st.DrawFn, root: Unit, model: ModelSpec) -> list[AnyStep]:
    """What may be done with FSDP, in any order that is legal (:class:`tests.programs.legality.Ledger`)."""
    train, update = st.builds(Train, modes(model.kinds, root), RARELY), st.builds(Step, RARELY)
    others: list[st.SearchStrategy[AnyStep]] = [
        train,
        zero_grads(root),
        evaluations(),
        reloads(),
        freezings(model),
        st.builds(Summon, st.booleans()),
        st.builds(Peek, st.sampled_from(PEEKS)),
        st.just(Look()),
        st.builds(Inspect, st.booleans()),
        st.builds(Fail, st.sampled_from(["forward", "backward", "no_sync"])),
    ]
    ledger, steps = Ledger(model.kinds, root), list[AnyStep]()
    other = st.one_of(others)
    rounds = st.tuples(train, update) | st.tuples(train, clips(), update) | st.tuples(other, other, other)
    for step in (step for some in draw(st.lists(rounds, min_size=8, max_size=15)) for step in some):
        if isinstance(step, SetTrainable):
            if ledger.waiting or model.head_frozen:
                continue
            steps.append(ZeroGrad())
            ledger.note(steps[-1])
        updates = isinstance(step, Step | Clip)
        if ledger.allows(step) and (not updates or (ledger.reduced and not ledger.waiting)):
            ledger.note(step)
            steps.append(step)
    return steps


@st.composite
def interludes(draw: st.DrawFn, model: ModelSpec, options: Sharded, plain: bool) -> list[AnyStep]:
    """What happens between passes of OSS."""
    kinds = ["save", "reload", "closure"] if plain else [
        "evaluate", "evaluate_0", "save", "reload", "trainable", "fail", "late", "closure"]  # fmt: skip
    kind = draw(st.sampled_from(kinds))
    if kind in ("evaluate", "evaluate_0"):
        return [Evaluate(only_rank_0=kind == "evaluate_0")]
    if kind == "save":
        return [Save(draw(st.sampled_from([-1, 0])))]
    if kind == "reload":
        return [Reload()]
    if kind == "trainable":
        if options.late and len(model.nodes) == 1:
            return []
        node = draw(st.integers(0, len(model.nodes) - (2 if options.late else 1)))
        return [ZeroGrad("module", True), SetTrainable((node,), draw(st.booleans()))]
    if kind == "fail":
        return [Fail(draw(st.sampled_from(["forward", "backward"])))]
    if kind == "late":
        return [ZeroGrad("module", True), AddGroup()] if options.late else []
    if options.optimizers > 1:
        return []
    return [ZeroGrad("wrapper", True), Step(closure=True), ZeroGrad("wrapper", True)]


def _once(steps: list[AnyStep]) -> tuple[AnyStep, ...]:
    """The late group can be added only once."""
    first = next((i for i, s in enumerate(steps) if isinstance(s, AddGroup)), -1)
    return tuple(s for i, s in enumerate(steps) if i <= first or not isinstance(s, AddGroup))


# ------------------------------------------------------------------------------------------------ programs
@st.composite
def programs(
    draw: st.DrawFn,
    plain: bool = False,
    leaves: tuple[str, ...] | None = None,
    optimizer_names: tuple[str, ...] = DENSE_OPTIMIZERS,
    dtype: str = "float64",
    wrapper: str = "sharded",
    partition: str = "",
) -> Program:
    """A whole program for OSS; ``plain`` keeps to what fairscale mostly does right."""
    if leaves is None:
        leaves = PLAIN_LEAVES if plain else (*PLAIN_LEAVES, *((*RARE_LEAVES, "sparse") * 2))
    model = draw(stacks(leaves, dtype))
    optimizer = draw(optimizers(model, optimizer_names, plain))
    options = Sharded(
        broadcast_buffers=draw(st.booleans()),
        reduce_buffer_size=draw(st.sampled_from([2**23, 0, 16])),
        optimizers=draw(st.sampled_from([1, 1, 2])),
        late="" if plain or optimizer.scheduler else draw(st.sampled_from(["", "", "frozen", "trainable"])),
        partition=partition,
        wrapper=wrapper,
    )
    steps: list[AnyStep] = []
    for _ in range(draw(st.integers(1, 3))):
        steps += draw(iterations(model.kinds, options, plain))
        if draw(st.booleans()):
            steps += draw(interludes(model, options, plain))
    routing = "same" if plain else draw(ROUTINGS)
    program = Program(model, options, optimizer, _once(steps), draw(st.integers(0, 20)), routing)
    assume(meaningful(program))
    return program


@st.composite
def unit_programs(
    draw: st.DrawFn,
    plain: bool = False,
    dtype: str = "float64",
    low: tuple[str, ...] = (),
    in_any_order: bool = False,
) -> Program:
    """A whole program for FSDP; ``plain`` as above, ``low`` are dtypes of mixed precision.

    Its steps are those of training loops, or ``in_any_order``.
    """
    root = draw(low_precision(low) if low else unit_options(plain))
    model = draw(trees(root, plain or bool(low), dtype, STEADY_LEAVES if low else ()))
    steps: list[AnyStep] = draw(moves(root, model)) if in_any_order else []
    for _ in range(0 if in_any_order else draw(st.integers(1, 3))):
        steps += draw(iterations(model.kinds, root, plain))
        if draw(st.booleans()):
            steps += draw(unit_interludes(root, model, plain))
    routing = "same" if plain else draw(ROUTINGS)
    even = not model.kinds & UNEVENLY_USED and not any(isinstance(s, SetTrainable) for s in steps)
    names = ("sgd", "momentum") if low else (*STEPLESS, *COUNTING) if even else STEPLESS
    optimizer = OptimizerSpec(draw(st.sampled_from(names)), 0.01 if low else 0.05)
    program = Program(model, root, optimizer, (*steps, Look()), draw(st.integers(0, 20)), routing)
    assume(meaningful(program))
    return program
