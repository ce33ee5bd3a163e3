"""Whole training programs on real ranks against the same programs in one process with plain torch."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.programs.optimizers import OPTIMIZERS
from tests.programs.running import check_against_truth, examples
from tests.programs.spec import (
    Clip,
    Fail,
    OptimizerSpec,
    Program,
    Reload,
    Sharded,
    Step,
    Train,
    ZeroGrad,
    stack,
)
from tests.programs.strategies import PLAIN_LEAVES, programs
from tests.programs.written import BUFFERS, FEWER_PARAMETERS_THAN_RANKS, ITERATION, PROGRAMS

WHOLE = (ZeroGrad(), Train(no_sync=True), Train(), Clip(), Step())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_written_programs(name: str, world_size: int) -> None:
    check_against_truth(PROGRAMS[name], world_size, backend="gloo")


def test_buffers_are_rank_0s() -> None:
    check_against_truth(BUFFERS, 2, backend="gloo")


def test_fewer_parameters_than_ranks() -> None:
    check_against_truth(FEWER_PARAMETERS_THAN_RANKS, 3, backend="gloo")


@examples(40)
@given(programs())
def test_any_program_on_two_ranks(program: Program) -> None:
    check_against_truth(program, 2)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@examples(20)
@given(program=programs())
def test_any_program_on_other_numbers_of_ranks(world_size: int, program: Program) -> None:
    check_against_truth(program, world_size)


@examples(20)
@given(programs(partition="balanced"))
def test_own_api_with_balanced_owners(program: Program) -> None:
    check_against_truth(program, 3, "core")


@examples(15)
@given(programs(plain=True, wrapper="ddp", leaves=tuple(b for b in PLAIN_LEAVES if b != "running_mean")))
def test_oss_alone_under_ddp(program: Program) -> None:
    check_against_truth(program, 2)


@examples(15)
@given(programs(dtype="float32"))
def test_single_precision(program: Program) -> None:
    check_against_truth(program, 3)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "sparse_adam"])
def test_every_optimizer_keeps_its_course_over_a_reload(name: str) -> None:
    steps = (*WHOLE, *WHOLE, Reload(), *WHOLE, *WHOLE)
    if name == "lbfgs":
        steps = (Step(closure=True), Reload(), Step(closure=True))
    spec = OptimizerSpec(
        name, groups=1 if name == "lbfgs" else 2, form="parameters" if name == "lbfgs" else "groups"
    )
    kinds = ("linear", "conv") if name == "lbfgs" else ("linear", "odd", "conv")  # contiguous gradients only
    check_against_truth(Program(stack(*kinds), Sharded(), spec, steps), 2)


@pytest.mark.parametrize("wrapper", ["sharded", "ddp"])
def test_sparse_gradients_with_the_optimizers_that_take_them(wrapper: str) -> None:
    for name in ("sgd", "adagrad"):
        options, steps = Sharded(wrapper=wrapper), (*WHOLE[:-2], Step()) * 2
        check_against_truth(Program(stack("sparse", "linear"), options, OptimizerSpec(name), steps), 2)


@pytest.mark.parametrize("bucket", [0, 2**23])
@pytest.mark.parametrize("half", ["reduce", "broadcast"])
def test_half_precision_on_the_wire_stays_near_the_truth(half: str, bucket: int) -> None:
    options = Sharded(
        reduce_buffer_size=bucket, reduce_fp16=half == "reduce", broadcast_fp16=half == "broadcast"
    )
    model = stack("linear", "mlp", dtype="float32")
    check_against_truth(Program(model, options, steps=(ZeroGrad(), Train(), Step()) * 3), 2)


# ------------ What once went wrong.
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_where_a_rank_owns_nothing_and_parameters_are_double(norm_type: float) -> None:
    """Such a rank sent its norm of nothing in fp32, the others theirs in fp64."""
    steps = (ZeroGrad(), Train(), Clip(0.1, norm_type), Step())
    check_against_truth(Program(stack("frozen"), Sharded(), steps=steps), 4, backend="gloo")


def test_backward_that_dies_while_buckets_are_in_flight() -> None:
    """The memory of buckets was given back while the network still read it."""
    program = Program(
        stack("linear", "mlp", width=6),
        Sharded(reduce_buffer_size=0),
        OptimizerSpec("adam"),
        (Fail("backward"),) * 20 + ITERATION,
    )
    check_against_truth(program, 3, backend="gloo")
