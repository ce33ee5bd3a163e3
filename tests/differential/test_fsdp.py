"""FullyShardedDataParallel beside the real fairscale: same programs, same outcome, same formats, shared checkpoints.

fairscale runs in rank processes of its own, on a CPU that it takes for a CUDA device. It is what shardkit is compared
with *and* held to the truth itself, so that a program on which fairscale is wrong shows as a missing rule in
:mod:`tests.programs.fairscale_limits`, not as a failure of shardkit.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given

from tests.programs.fairscale_limits import fairscale_limit
from tests.programs.running import check_resumed, check_three_ways, examples
from tests.programs.spec import (
    Clip,
    Inspect,
    Look,
    ModelSpec,
    Node,
    OptimizerSpec,
    Program,
    Step,
    Train,
    Unit,
    ZeroGrad,
)
from tests.programs.strategies import unit_programs

pytest.importorskip("fairscale.nn.data_parallel")
pytestmark = pytest.mark.oracle

ROUND = (ZeroGrad(), Train(no_sync=True), Train(), Clip(0.5), Step(), Look())


FLAT, EACH = Unit(), Unit(flatten_parameters=False)


def model(options: Unit = FLAT) -> ModelSpec:
    """Nested units, leftovers for the root, buffers, sizes that no number of ranks divides."""
    block = Node("residual", (Node("mlp", unit=options), Node("norm")), options)
    # a CPU has no batch norm of half inputs with buffers in full precision
    other = Node("norm" if options.mixed_precision else "batch_norm")
    nodes = (Node("linear", unit=options), block, other, Node("no_bias", unit=options))
    return ModelSpec(nodes, 3, "float32")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@examples(20)
@given(program=unit_programs(plain=True, dtype="float32"))
def test_same_as_fairscale(world_size: int, program: Program) -> None:
    assume(fairscale_limit(program, world_size) is None)
    check_three_ways(program, world_size)


@examples(20)
@given(unit_programs(plain=True, dtype="float32", low=("float16",)))
def test_same_as_fairscale_in_mixed_precision(program: Program) -> None:
    assume(fairscale_limit(program, 2) is None)
    check_three_ways(program, 2)


TREES = {
    "nested": model(),
    "unflattened": model(EACH),
    "both": ModelSpec(
        (Node("mlp", unit=EACH), Node("chain", (Node("linear", unit=FLAT), Node("norm")), FLAT)),
        3,
        "float32",
    ),
    "root only": ModelSpec((Node("mlp"), Node("conv")), 3, "float32"),
    "root without parameters of its own": ModelSpec(
        (Node("chain", (Node("mlp", unit=FLAT),), FLAT),), 3, "float32"
    ),
    "tied": ModelSpec((Node("tied"), Node("embedding", unit=FLAT)), 3, "float32"),
    "frozen units": ModelSpec(
        (Node("mlp", unit=FLAT, frozen="all"), Node("linear", unit=FLAT)), 3, "float32"
    ),
    "tiny": ModelSpec((Node("odd", unit=FLAT), Node("batch_norm", unit=FLAT)), 3, "float32"),
    "buffers": ModelSpec((Node("conv", unit=FLAT), Node("running_mean", unit=FLAT)), 4, "float32"),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", TREES)
def test_formats(name: str, world_size: int) -> None:
    """Names and shapes of parameters, local state and metadata, full optimizer state: before training and after."""
    tree = TREES[name]
    options = EACH if name == "unflattened" else FLAT
    flat = all(n.unit is None or n.unit.flatten_parameters for _, n in tree.walk()) and options is FLAT
    for optimizer in ("momentum", "adam"):
        steps = (Inspect(False), *ROUND, Inspect(flat))
        program = Program(tree, options, OptimizerSpec(optimizer), steps)
        assert fairscale_limit(program, world_size) is None
        check_three_ways(program, world_size)


OPTIONS = {
    "parameters on cpu": Unit(move_params_to_cpu=True),
    "no reshard": Unit(reshard_after_forward=False),
    "no buckets": Unit(bucket_cap_mb=0),
    "divide before": Unit(gradient_predivide_factor=2.0),
    "state on rank 0": Unit(state_dict_on_rank_0_only=True),
    "optimizer state stays": Unit(no_broadcast_optim_state=True),
    "half": Unit(mixed_precision=True),
    "half, reduced in fp32": Unit(mixed_precision=True, fp32_reduce_scatter=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options = OPTIONS[name]
    inner = dataclasses.replace(options, state_dict_on_rank_0_only=False)
    # told to leave optimizer state where it is, fairscale can't gather the rest, unless groups differ
    steps = (*ROUND, *ROUND, Inspect(not options.no_broadcast_optim_state))
    program = Program(model(inner), options, steps=steps)
    check_three_ways(program, 2)


@pytest.mark.parametrize("writer", ["fairscale", "shardkit"])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("form", ["full", "consolidated", "local"])
def test_checkpoints_of_one_load_into_the_other(form: str, wrote: int, reads: int, writer: str) -> None:
    if form == "local" and (wrote != reads or writer == "shardkit"):
        pytest.skip(
            "local states are for as many ranks as wrote them; fairscale can't load them into nested units"
        )
    reader = {"fairscale": "shardkit", "shardkit": "fairscale"}[writer]
    for optimizer in ("momentum", "adamw_loop"):
        program = Program(model(), FLAT, OptimizerSpec(optimizer))
        check_resumed(program, (ROUND, ROUND), (writer, wrote), (reader, reads), form)


def test_local_states_load_into_fairscale() -> None:
    """Into a single unit, which is what it can do."""
    program = Program(TREES["root only"], FLAT)
    check_resumed(program, (ROUND, ROUND), ("shardkit", 2), ("fairscale", 2), "local")
