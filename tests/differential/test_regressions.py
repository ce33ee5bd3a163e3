"""Programs on which shardkit was wrong once, found by the drawn ones and made small."""

from __future__ import annotations

import pytest

from tests.programs.running import check_against_truth
from tests.programs.spec import (
    Clip,
    FailInBackward,
    ModelSpec,
    OptimizerSpec,
    Options,
    Program,
    Step,
    Train,
    ZeroGrad,
)

ONE_STEP = (ZeroGrad(), Train(), Step())


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_where_a_rank_owns_nothing_and_parameters_are_double(norm_type: float) -> None:
    """Such a rank sent its norm of nothing in fp32, the others theirs in fp64."""
    steps = (ZeroGrad(), Train(), Clip(0.1, norm_type), Step())
    check_against_truth(Program(ModelSpec(("frozen",)), steps=steps), 4)


def test_backward_that_dies_while_buckets_are_in_flight() -> None:
    """The memory of buckets was given back while the network still read it."""
    program = Program(
        ModelSpec(("linear", "mlp"), width=6),
        OptimizerSpec("adam"),
        Options(reduce_buffer_size=0),
        (FailInBackward(),) * 20 + ONE_STEP,
    )
    check_against_truth(program, 3)
