"""FSDP on XLA replicas by three wrappers beside one process: shardkit's, its torch_xla interface, torch_xla's own.

Models and options are drawn. SHARDKIT_FUZZ=n draws n times as many, and new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pools import rank_pool
from tests.programs.running import examples
from tests.xla import drawn
from tests.xla.drawn import LEAVES, LIBRARIES, Node, Program

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

LEAF = st.builds(
    Node, st.sampled_from(list(LEAVES)), st.booleans(), frozen=st.sampled_from([False] * 3 + [True])
)
CHAIN = st.builds(
    lambda unit, children: Node("chain", unit, children=tuple(children)),
    st.booleans(),
    st.lists(LEAF, min_size=1, max_size=2),
)
SWITCHES = (
    "reshard_after_forward",
    "flatten_parameters",
    "disable_reshard_on_root",
    "shard_param_on_dim_0",
    "coalesce_all_gather_ops",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    options: dict[str, Any] = {name: draw(st.booleans()) for name in SWITCHES}
    options["compute_dtype"] = draw(st.sampled_from([None, torch.float32]))
    options["align"] = draw(st.sampled_from([None, "parameters", "rows", 4]))
    micro = draw(st.integers(1, 3))
    return Program(
        tuple(draw(st.lists(LEAF | CHAIN, min_size=1, max_size=3))),
        draw(st.integers(3, 9)),
        options,
        draw(st.sampled_from(["sgd", "adam"])),
        micro,
        micro > 1 and draw(st.booleans()),
        draw(st.sampled_from([None, 0.1])),
    )


def assert_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def check(program: Program, world_size: int) -> None:
    from torch_xla.distributed import fsdp as theirs

    from shardkit.xla import fsdp as ours

    one = drawn.truth(program, world_size)
    ranks = rank_pool(world_size, "xla").run(drawn.run, program)
    for library in LIBRARIES:
        for rank, result in enumerate(ranks):
            wanted = [step[rank] for step in one["losses"]]
            assert result[library]["losses"] == pytest.approx(wanted, rel=1e-6, abs=1e-6), (library, rank)
            assert result[library]["norms"] == pytest.approx(one["norms"], rel=1e-5), (library, rank)
    full: dict[str, Any] = {"core": ranks[0]["core"]["state"]}
    for library in ("shardkit", "torch_xla"):
        parts = [result[library]["state"] for result in ranks]
        for reader in (ours, theirs):
            joined = reader.consolidate_sharded_state_dicts(parts, ranks[0][library]["metadata"])
            full.setdefault(library, joined)
            assert_same(joined, full[library], 0.0)
    for library in LIBRARIES:
        assert_same(full[library], one["full"], 1e-5)
    for library in ("core", "shardkit"):
        assert_same(full[library], full["torch_xla"], 1e-5)


@examples(5)
@given(programs())
def test_two_replicas(program: Program) -> None:
    check(program, 2)


@examples(3)
@given(programs())
def test_four_replicas(program: Program) -> None:
    check(program, 4)
