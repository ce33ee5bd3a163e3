"""Whole training programs with FullyShardedDataParallel on real ranks against the same programs in one process."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from tests.programs.optimizers import COUNTING, STEPLESS
from tests.programs.running import check_against_truth, examples
from tests.programs.spec import (
    MOMENTUM,
    AnyStep,
    Clip,
    Evaluate,
    Fail,
    Inspect,
    Look,
    ModelSpec,
    Node,
    OptimizerSpec,
    Program,
    Reload,
    Reset,
    SetTrainable,
    Step,
    Summon,
    Train,
    Unit,
    ZeroGrad,
)
from tests.programs.strategies import unit_programs

ROUND = (ZeroGrad(), Train(no_sync=True), Train(), Clip(0.5), Step(), Look())
RICH = (Summon(), *ROUND, Evaluate(), *ROUND, Reload(), *ROUND)


def model(options: Unit, dtype: str = "float64") -> ModelSpec:
    """Nested units, leftovers for the root, sizes that no number of ranks divides."""
    inner = dataclasses.replace(options, state_dict_on_rank_0_only=False)
    block = Node("residual", (Node("mlp", unit=inner), Node("norm")), inner)
    return ModelSpec((Node("linear", unit=inner), block, Node("odd"), Node("no_bias", unit=inner)), 3, dtype)


@examples(40)
@given(unit_programs())
def test_any_program_on_two_ranks(program: Program) -> None:
    check_against_truth(program, 2)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@examples(18)
@given(program=unit_programs())
def test_any_program_on_other_numbers_of_ranks(world_size: int, program: Program) -> None:
    check_against_truth(program, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@examples(20)
@given(program=unit_programs(in_any_order=True))
def test_any_order_of_moves(world_size: int, program: Program) -> None:
    check_against_truth(program, world_size)


@examples(25)
@given(unit_programs(dtype="float32", low=("float16", "bfloat16")))
def test_mixed_precision(program: Program) -> None:
    check_against_truth(program, 2)


OPTIONS = {
    "default": Unit(),
    "without vectors": Unit(flatten_parameters=False),
    "no reshard": Unit(reshard_after_forward=False),
    "reshard root": Unit(disable_reshard_on_root=False),
    "parameters on cpu": Unit(move_params_to_cpu=True),
    "old name of offload": Unit(cpu_offload=True),
    "gradients on cpu": Unit(move_grads_to_cpu=True),
    "no buckets": Unit(bucket_cap_mb=0),
    "tiny buckets": Unit(bucket_cap_mb=0.0001),
    "divide before, by more than there are ranks": Unit(gradient_predivide_factor=8.0),
    "state on rank 0": Unit(state_dict_on_rank_0_only=True),
    "clear autocast cache": Unit(clear_autocast_cache=True),
    "inputs to fp32": Unit(force_input_to_fp32=True),
    "verbose": Unit(verbose=True),
    "whole parameters": Unit(align="parameters"),
    "whole rows": Unit(align="rows"),
    "whole rows without vectors": Unit(align="rows", flatten_parameters=False),
    "aligned": Unit(align=4),
    "half": Unit(mixed_precision=True),
    "half, reduced in fp32": Unit(mixed_precision=True, fp32_reduce_scatter=True),
    "bfloat16": Unit(mixed_precision=True, compute_dtype="bfloat16"),
    "mixed precision that is not": Unit(mixed_precision=True, compute_dtype="float32"),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, world_size: int) -> None:
    options = OPTIONS[name]
    backend = "gloo" if world_size == 2 else "simulated"
    check_against_truth(Program(model(options, "float32"), options, steps=RICH), world_size, backend=backend)


@pytest.mark.parametrize("name", [*STEPLESS, *COUNTING, "asgd", "rprop"])
def test_every_optimizer_keeps_its_course_over_a_reload(name: str) -> None:
    steps = (*ROUND, Reload("full", "full"), *ROUND, Reload("local", "local"), *ROUND)
    for options in (Unit(), Unit(flatten_parameters=False)):
        check_against_truth(Program(model(options), options, OptimizerSpec(name), steps), 2)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes_of_parameters(dtype: str) -> None:
    steps = (*ROUND, Evaluate(), *ROUND)
    check_against_truth(Program(model(Unit(), dtype), Unit(), steps=steps), 2)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("who", ["wrapper", "optimizer"])
def test_gradients_thrown_away_before_ranks_combined_them(who: Reset, flatten: bool) -> None:
    options = Unit(flatten_parameters=flatten)
    clear = ZeroGrad(who)
    steps = (Train(no_sync=True), clear, Train(), Step(), Look(), Train(no_sync=True), clear, *ROUND)
    check_against_truth(Program(model(options), options, steps=steps), 2)


@pytest.mark.parametrize("flatten", [True, False])
def test_several_groups_of_parameters(flatten: bool) -> None:
    options = Unit(flatten_parameters=flatten)
    optimizer = OptimizerSpec("adam", groups=2, form="even_groups")
    steps = (*ROUND, Reload("consolidated"), *ROUND)
    check_against_truth(Program(model(options), options, optimizer, steps), 3)


# ------------ What fairscale's gets wrong, silently or not.
FLAT, EACH = Unit(), Unit(flatten_parameters=False)
LOOP = (ZeroGrad(), Train(), Step(), Look())
REPEATED = (ZeroGrad(), Train(), Train(), Train(), Step(), Look())


def _program(
    *nodes: Node,
    steps: tuple[AnyStep, ...] = LOOP * 3,
    root: Unit = FLAT,
    routing: str = "same",
    optimizer: OptimizerSpec = MOMENTUM,
) -> Program:
    return Program(ModelSpec(nodes), root, optimizer, steps, routing=routing)


def _frozen_and_thawed(*changes: SetTrainable) -> tuple[AnyStep, ...]:
    thaw = dataclasses.replace(changes[0], trainable=True)
    return (*LOOP, ZeroGrad(), *changes, *LOOP, ZeroGrad(), thaw, *LOOP)


def _of_units(unit: Unit) -> dict[str, Program]:
    """With a vector of all parameters and without."""
    shared, mlp, linear = Node("shared", unit=unit), Node("mlp", unit=unit), Node("linear")
    some = _frozen_and_thawed(SetTrainable((0,), False, "weight"), SetTrainable((1,), False, "bias"))
    return {
        "weights tied across two units": _program(shared, Node("norm"), shared, root=unit),
        "a weight tied to one further down": _program(
            Node("shared"), Node("chain", (Node("shared"),), unit), steps=(*LOOP, Reload(), *LOOP), root=unit
        ),
        # not even weight decay or momentum move it
        "a layer that no forward uses": _program(
            Node("chain", (Node("unused"), linear), unit), Node("unused"), root=unit
        ),
        **{
            f"a layer that is used now and then, {routing}": _program(
                Node("branch", unit=unit), Node("branch"), root=unit, routing=routing
            )
            for routing in ("same", "by_rank", "rank_0")
        },
        "part of a unit frozen before wrapping": _program(
            Node("mlp", frozen="weight"), Node("linear", unit=unit, frozen="bias"), root=unit
        ),
        "part of a unit frozen after wrapping": _program(
            Node("mlp"), Node("linear", unit=unit), steps=some, root=unit
        ),
        "a whole unit frozen and thawed": _program(
            mlp, linear, steps=_frozen_and_thawed(SetTrainable((0,), False)), root=unit
        ),
        **{
            f"forwards and backwards, {mode}": _program(
                mlp,
                linear,
                steps=(ZeroGrad(), Train(mode, no_sync=True), Train(mode), Step(), Look()) * 2,
                root=unit,
            )
            for mode in ("two", "sum", "twice")
        },
        # also into one element, whose shard looks like the whole
        "accumulating without no_sync": _program(
            Node("odd", unit=unit), linear, steps=REPEATED * 2, root=unit
        ),
    }


MLP, ON_CPU = Node("mlp", unit=FLAT), Unit(move_params_to_cpu=True)
FAIRSCALE_IS_WRONG = {
    **{f"{name}, flattened": program for name, program in _of_units(FLAT).items()},
    **{f"{name}, unflattened": program for name, program in _of_units(EACH).items()},
    "frozen parameters of a unit without a vector": _program(
        Node("linear", unit=EACH, frozen="weight"), Node("frozen", unit=EACH), root=EACH
    ),
    "tied parameters of a unit without a vector": _program(
        Node("tied", unit=EACH), steps=(*LOOP, Reload("consolidated"), *LOOP), root=EACH
    ),
    "accumulating with gradients on the CPU": _program(
        Node("mlp", unit=ON_CPU), steps=REPEATED * 2, root=ON_CPU
    ),
    "offloading a unit without parameters": _program(
        Node("chain", (Node("linear", unit=Unit(cpu_offload=True)),), Unit(cpu_offload=True)),
        root=Unit(cpu_offload=True),
    ),
    **{
        f"an error in {where} leaves nothing behind": _program(
            MLP, Node("linear"), steps=(*LOOP, Fail(where), *LOOP)
        )
        for where in ("no_sync", "forward", "backward")
    },
    **{
        f"going on after the state of {name} was gathered": _program(
            MLP, Node("linear"), steps=(*LOOP, Inspect(), *LOOP), optimizer=OptimizerSpec(name)
        )
        for name in ("adam", "adamw_fused", "radam", "adadelta")
    },
    "optimizer state without vectors": _program(
        Node("mlp", unit=EACH),
        Node("chain", (Node("linear"),), FLAT),
        steps=(*LOOP, Reload(), *LOOP),
        root=EACH,
        optimizer=OptimizerSpec("adam"),
    ),
    "optimizer state where a unit has none": _program(
        Node("frozen", unit=FLAT), MLP, steps=(*LOOP, Reload(), *LOOP)
    ),
    "local states into a fresh nested model": _program(
        Node("chain", (MLP, Node("linear")), FLAT),
        Node("norm"),
        steps=(*LOOP, Reload("local", "local"), *LOOP),
    ),
    "consolidating buffers that state dicts leave out": _program(
        Node("running_mean", unit=FLAT), steps=(*LOOP, Reload("consolidated"), *LOOP)
    ),
    "consolidating tied weights of a unit below": _program(
        Node("tied", unit=FLAT), Node("tied"), steps=(*LOOP, Reload("consolidated"), *LOOP)
    ),
    "outputs of any shape": _program(
        *(Node(kind, (Node("linear", unit=FLAT),), FLAT) for kind in ("dataclass", "dict", "tuple"))
    ),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FAIRSCALE_IS_WRONG)
def test_what_fairscale_gets_wrong(name: str, world_size: int) -> None:
    backend = "gloo" if world_size == 2 else "simulated"
    check_against_truth(FAIRSCALE_IS_WRONG[name], world_size, backend=backend)


# ------------ What once went wrong here.
FOUND = {
    # the unit's own gradients were all there while its frozen layer was still needed for those of the unit below
    "a frozen layer above a unit": Program(
        ModelSpec((Node("linear", unit=Unit()), Node("frozen"))), steps=(Train(), Step(), Look())
    ),
    # the second backward did not notice that it was inside of the unit
    # the gradient of the unit's input came first, for that is a leaf there, and the frozen layer was given back
    "a frozen layer beside what a re-entrant checkpoint goes through": Program(
        ModelSpec(
            (
                Node("linear"),
                Node(
                    "recomputed_reentrant",
                    (Node("detached", (Node("linear", unit=Unit()), Node("frozen")), Unit()),),
                ),
            )
        ),
        steps=(Train(), Step(), Look()),
    ),
    "a partly frozen unit, backward twice": Program(
        ModelSpec((Node("linear"), Node("attention", unit=Unit(), frozen="weight"))),
        steps=(Train("twice"), Step(), Look()),
    ),
    # after the full state, the unit that borrows the weight listed it too
    "a shared weight in a local state dict after a full one": Program(
        ModelSpec((Node("shared", unit=EACH), Node("shared"))), EACH, steps=(Look(), Reload("local"))
    ),
    # the rank that detaches the unit's output did not gather it in backward, and the other one waited
    "a unit whose output one rank detaches": Program(
        ModelSpec((Node("linear"), Node("cut", (Node("linear"),), Unit()), Node("shared"))),
        steps=(Train(), Train(), Clip(0.3), Step(), Look()),
        routing="by_rank",
    ),
    # backward came to the unit that returns its input after it had left it, and gathered it once more
    "a unit that passes its input through, above it a cut on one rank": Program(
        ModelSpec(
            (Node("no_bias", unit=Unit()), Node("unused", unit=Unit()), Node("cut", (Node("linear"),)))
        ),
        steps=(Train(), Step(), Look()),
        routing="rank_0",
    ),
    # the rank that cut one of two forwards off gave a shared weight back earlier, and gathered it once more
    "a shared weight, two forwards, one cut off on one rank": Program(
        ModelSpec(
            (
                Node("shared", unit=Unit()),
                Node("cut", (Node("embedding", unit=Unit()),), Unit()),
                Node("shared", unit=Unit()),
            )
        ),
        steps=(Train("sum", no_sync=True), Train("sum"), Step(), Look()),
        routing="rank_0",
    ),
    # its momentum was taken for a count of steps
    "optimizer state of one number": Program(
        ModelSpec((Node("odd", unit=EACH),)), steps=(Train(), Step(), Reload(), *ROUND)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_once_went_wrong(name: str) -> None:
    check_against_truth(FOUND[name], 2, backend="gloo")
