"""OSS + ShardedDataParallel beside the real fairscale: the same programs, the same outcome wherever that one is right.

fairscale is what shardkit is compared with *and* held to the truth itself, so that a program on which fairscale is
wrong shows as a missing rule in :mod:`tests.programs.legality`, not as a failure of shardkit.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from tests.differential.keeping import kept
from tests.programs.legality import fairscale_limit
from tests.programs.result import compare, tolerance_for
from tests.programs.running import examples, run_ranks
from tests.programs.spec import Clip, ModelSpec, OptimizerSpec, Options, Program, Save, Step, Train, ZeroGrad
from tests.programs.strategies import programs
from tests.programs.truth import run_truth

pytest.importorskip("fairscale.optim.oss")
pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]


@kept
def check_three_ways(program: Program, world_size: int) -> None:
    """Truth, fairscale and shardkit."""
    assert fairscale_limit(program, world_size) is None
    tolerance = tolerance_for(program)
    theirs = run_ranks("fairscale", program, world_size)
    # buffers of other ranks than 0 are brought around at different moments
    compare(theirs, run_truth(program, world_size), tolerance, buffers_of=[0])
    compare(run_ranks("shardkit", program, world_size), theirs, tolerance, buffers_of=[0], partition=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@examples(20)
@given(program=programs(plain=True))
def test_same_as_fairscale(world_size: int, program: Program) -> None:
    assume(fairscale_limit(program, world_size) is None)
    check_three_ways(program, world_size)


@examples(20)
@given(programs(plain=True, dtype="float32"))
def test_same_as_fairscale_with_clipping_in_single_precision(program: Program) -> None:
    assume(fairscale_limit(program, 2) is None)
    check_three_ways(program, 2)


STEPS = (ZeroGrad(), Train(no_sync=True), Train(), Step(), Save(0)) * 2


@pytest.mark.parametrize("bucket", [0, 16, 2**23])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bucket_sizes(world_size: int, bucket: int) -> None:
    model = ModelSpec(("mlp", "odd", "conv", "embedding"))
    check_three_ways(
        Program(model, OptimizerSpec("momentum"), Options(reduce_buffer_size=bucket), STEPS), world_size
    )


def test_fp16_on_the_wire() -> None:
    """Of parameters (broadcast_fp16); both round the owner's copy, too."""
    program = Program(
        ModelSpec(("mlp",), dtype="float32"), OptimizerSpec("momentum"), Options(broadcast_fp16=True), STEPS
    )
    check_three_ways(program, 2)


def test_several_optimizers_over_one_module() -> None:
    program = Program(
        ModelSpec(("mlp", "tied", "norm")), OptimizerSpec("adamw_fused"), Options(optimizers=3), STEPS
    )
    check_three_ways(program, 2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_clipping(norm_type: float) -> None:
    steps = (ZeroGrad(), Train(), Clip(0.1, norm_type), Step()) * 2
    check_three_ways(
        Program(ModelSpec(("mlp", "norm"), dtype="float32"), OptimizerSpec("momentum"), steps=steps), 2
    )
