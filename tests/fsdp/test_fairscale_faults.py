"""What fairscale's FullyShardedDataParallel gets wrong, silently or not: here it is right, through fairscale's API.

Programs say what ranks do; plain torch in one process says what has to come out.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check_against_truth
from tests.programs.spec import (
    MOMENTUM,
    Evaluate,
    Fail,
    Inspect,
    Look,
    ModelSpec,
    Node,
    OptimizerSpec,
    Program,
    Reload,
    SetTrainable,
    Step,
    Train,
    Unit,
    ZeroGrad,
)

FLAT, EACH = Unit(), Unit(flatten_parameters=False)
UNITS = pytest.mark.parametrize("unit", [FLAT, EACH], ids=["flattened", "unflattened"])
ROUND = (ZeroGrad(), Train(), Step(), Look())


def check(
    nodes: tuple[Node, ...],
    steps: tuple[Any, ...] = ROUND * 3,
    *,
    root: Unit = FLAT,
    dtype: str = "float64",
    optimizer: OptimizerSpec = MOMENTUM,
    routing: str = "same",
) -> None:
    """Two ranks and three, against one process."""
    for world_size in (2, 3):
        model = ModelSpec(nodes, dtype=dtype)
        program = Program(model, root, optimizer, steps, routing=routing)
        check_against_truth(program, world_size, backend="gloo" if world_size == 2 else "simulated")


# ------------------------------------------------------------------------------------ which parameters move
@UNITS
def test_weights_tied_across_two_units(unit: Unit) -> None:
    nodes = (Node("shared", unit=unit), Node("norm"), Node("shared", unit=unit))
    check(nodes, root=unit)
    check((Node("shared"), Node("chain", (Node("shared"),), unit)), (*ROUND, Reload(), *ROUND), root=unit)


@UNITS
def test_a_layer_that_no_forward_uses_stays_as_it_is(unit: Unit) -> None:
    """Not even weight decay or momentum move it."""
    check((Node("chain", (Node("unused"), Node("linear")), unit), Node("unused")), root=unit)


@UNITS
def test_a_layer_that_is_used_now_and_then(unit: Unit) -> None:
    for routing in ("same", "by_rank", "rank_0"):
        check((Node("branch", unit=unit), Node("branch")), root=unit, routing=routing)


@UNITS
def test_part_of_a_unit_frozen_before_wrapping(unit: Unit) -> None:
    check((Node("mlp", frozen="weight"), Node("linear", unit=unit, frozen="bias")), root=unit)


@UNITS
def test_part_of_a_unit_frozen_after_wrapping(unit: Unit) -> None:
    freeze = (ZeroGrad(), SetTrainable((0,), False, "weight"), SetTrainable((1,), False, "bias"))
    thaw = (ZeroGrad(), SetTrainable((0,), True, "weight"))
    check((Node("mlp"), Node("linear", unit=unit)), (*ROUND, *freeze, *ROUND, *thaw, *ROUND), root=unit)


@UNITS
def test_a_whole_unit_frozen_and_thawed(unit: Unit) -> None:
    freeze, thaw = (ZeroGrad(), SetTrainable((0,), False)), (ZeroGrad(), SetTrainable((0,), True))
    check((Node("mlp", unit=unit), Node("linear")), (*ROUND, *freeze, *ROUND, *thaw, *ROUND), root=unit)


def test_frozen_parameters_of_a_unit_without_a_vector() -> None:
    check((Node("linear", unit=EACH, frozen="weight"), Node("frozen", unit=EACH)), root=EACH)


def test_tied_parameters_of_a_unit_without_a_vector() -> None:
    check((Node("tied", unit=EACH),), (*ROUND, Reload("consolidated"), *ROUND), root=EACH)


# ------------------------------------------------------------------------------------ orders of calls
@UNITS
def test_forwards_and_backwards_in_any_order(unit: Unit) -> None:
    nodes = (Node("mlp", unit=unit), Node("linear"))
    for mode in ("two", "sum", "twice"):
        check(nodes, (ZeroGrad(), Train(mode, no_sync=True), Train(mode), Step(), Look()) * 2, root=unit)


@UNITS
def test_accumulating_without_no_sync(unit: Unit) -> None:
    """Also into one element, whose shard looks like the whole."""
    nodes = (Node("odd", unit=unit), Node("linear"))
    check(nodes, (ZeroGrad(), Train(), Train(), Train(), Step(), Look()) * 2, root=unit)


def test_accumulating_with_gradients_on_the_cpu() -> None:
    unit = Unit(move_params_to_cpu=True)
    check((Node("mlp", unit=unit),), (ZeroGrad(), Train(), Train(), Step(), Look()) * 2, root=unit)


def test_offloading_a_unit_without_parameters() -> None:
    unit = Unit(cpu_offload=True)
    check((Node("chain", (Node("linear", unit=unit),), unit),), root=unit)


@pytest.mark.parametrize("where", ["no_sync", "forward", "backward"])
def test_errors_leave_nothing_behind(where: str) -> None:
    check((Node("mlp", unit=FLAT), Node("linear")), (*ROUND, Fail(where), *ROUND))


def test_dividing_by_more_than_the_number_of_ranks() -> None:
    check((Node("linear"),), root=Unit(gradient_predivide_factor=8.0))


# ------------------------------------------------------------------------------------ dtypes
@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float16"])
def test_mixed_precision_computes_in_any_dtype(compute: str) -> None:
    unit = Unit(mixed_precision=True, compute_dtype=compute)
    steps = (ZeroGrad(), Train(no_sync=True), Train("sum"), Step(), Evaluate(), Look())
    check((Node("mlp", unit=unit), Node("norm")), steps, root=unit, dtype="float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@UNITS
def test_parameters_of_any_dtype(unit: Unit, dtype: str) -> None:
    check((Node("mlp", unit=unit), Node("linear")), ROUND, root=unit, dtype=dtype)


# ------------------------------------------------------------------------------------ states
@pytest.mark.parametrize("optimizer", ["adam", "adamw_fused", "radam", "adadelta"])
def test_training_goes_on_after_the_optimizers_full_state_was_gathered(optimizer: str) -> None:
    nodes = (Node("mlp", unit=FLAT), Node("linear"))
    check(nodes, (*ROUND, Inspect(), *ROUND), optimizer=OptimizerSpec(optimizer))


@UNITS
def test_optimizer_state_with_groups_of_parameters(unit: Unit) -> None:
    nodes = (Node("mlp", unit=unit), Node("linear"))
    check(
        nodes,
        (*ROUND, Reload(), *ROUND),
        root=unit,
        optimizer=OptimizerSpec("adam", groups=2, form="even_groups"),
    )


def test_optimizer_state_without_vectors() -> None:
    nodes = (Node("mlp", unit=EACH), Node("chain", (Node("linear"),), FLAT))
    check(nodes, (*ROUND, Reload(), *ROUND), root=EACH, optimizer=OptimizerSpec("adam"))


def test_optimizer_state_where_a_unit_has_none() -> None:
    check((Node("frozen", unit=FLAT), Node("mlp", unit=FLAT)), (*ROUND, Reload(), *ROUND))


def test_local_states_load_into_a_fresh_nested_model() -> None:
    nodes = (Node("chain", (Node("mlp", unit=FLAT), Node("linear")), FLAT), Node("norm"))
    check(nodes, (*ROUND, Reload("local", "local"), *ROUND))


def test_consolidating_buffers_that_state_dicts_leave_out() -> None:
    check((Node("running_mean", unit=FLAT),), (*ROUND, Reload("consolidated"), *ROUND))


def test_consolidating_tied_weights_of_a_unit_below() -> None:
    check((Node("tied", unit=FLAT), Node("tied")), (*ROUND, Reload("consolidated"), *ROUND))


# ------------------------------------------------------------------------------------ objects
def test_outputs_of_any_shape() -> None:
    boxes = tuple(Node(kind, (Node("linear", unit=FLAT),), FLAT) for kind in ("dataclass", "dict", "tuple"))
    check(boxes)
