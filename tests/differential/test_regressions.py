"""Programs on which shardkit was wrong once, found by the drawn ones and made small."""

from __future__ import annotations

import pytest

from tests.programs.running import check_against_truth
from tests.programs.spec import Clip, Fail, OptimizerSpec, Program, Sharded, Step, Train, ZeroGrad, stack

ONE_STEP = (ZeroGrad(), Train(), Step())


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
        (Fail("backward"),) * 20 + ONE_STEP,
    )
    check_against_truth(program, 3, backend="gloo")
