"""OSS + ShardedDataParallel beside the real fairscale: the same programs, the same outcome wherever that one is right.

fairscale is what shardkit is compared with *and* held to the truth itself, so that a program on which fairscale is
wrong shows as a missing rule in :mod:`tests.programs.fairscale_limits`, not as a failure of shardkit.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from tests.programs.fairscale_limits import fairscale_limit
from tests.programs.running import check_three_ways, examples
from tests.programs.spec import Program, Save, Sharded, Step, Train, ZeroGrad, stack
from tests.programs.strategies import programs

pytest.importorskip("fairscale.optim.oss")
pytestmark = pytest.mark.oracle


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


def test_fp16_on_the_wire() -> None:
    """Of parameters (broadcast_fp16); both round the owner's copy, too."""
    check_three_ways(Program(stack("mlp", dtype="float32"), Sharded(broadcast_fp16=True), steps=STEPS), 2)
