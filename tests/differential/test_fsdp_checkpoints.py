"""Drawn models: training that one library began and saved goes on in the other, at another number of ranks too."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.programs.fairscale_limits import fairscale_limit
from tests.programs.running import check_resumed, examples
from tests.programs.spec import Inspect, Look, OptimizerSpec, Program, Reload, Step, Train, ZeroGrad
from tests.programs.strategies import unit_programs

pytest.importorskip("fairscale.nn.data_parallel")
pytestmark = pytest.mark.oracle

ROUND = (ZeroGrad(), Train(), Step(), Look())
WAYS = [
    ("fairscale", 2, "shardkit", 3, "full"),
    ("shardkit", 3, "fairscale", 2, "full"),
    ("fairscale", 3, "shardkit", 2, "consolidated"),
    ("shardkit", 2, "fairscale", 3, "consolidated"),
    ("fairscale", 2, "shardkit", 2, "local"),
    ("shardkit", 2, "shardkit", 2, "local"),
]


@pytest.mark.parametrize(("writer", "before", "reader", "after", "form"), WAYS)
@examples(10)
@given(
    program=unit_programs(plain=True, dtype="float32"),
    optimizer=st.sampled_from(["momentum", "adamw_loop", "rmsprop", "adagrad"]),
)
def test_training_goes_on(
    writer: str, before: int, reader: str, after: int, form: str, program: Program, optimizer: str
) -> None:
    # what an optimizer with steps does with a layer that had no gradient yet is not the same at every number of ranks
    saving, loading = (*ROUND, Inspect()), (Reload(form), *ROUND)
    program = dataclasses.replace(program, optimizer=OptimizerSpec(optimizer), steps=ROUND)
    for library, world_size, steps in ((writer, before, saving), (reader, after, loading)):
        if library == "fairscale":
            assume(fairscale_limit(dataclasses.replace(program, steps=steps), world_size) is None)
    check_resumed(program, (ROUND, ROUND), (writer, before), (reader, after), form)
