"""What a step costs on XLA, where it does not depend on the machine: programs compiled, collectives, Python calls."""

from __future__ import annotations

import pytest

from tests.benchmarks import xla_training
from tests.benchmarks.xla_trainers import FSDP, NATIVE, SHARDED_DDP, UNSYNCED, XLA_FSDP
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]


TRAINERS = (NATIVE, SHARDED_DDP, UNSYNCED, FSDP, XLA_FSDP)


def test_programs_collectives_and_calls_beside_native_training() -> None:
    for result in rank_pool(2, "xla").run(xla_training.train, "mnist", TRAINERS, 0, 0):
        facts = result["facts"]
        for name in TRAINERS:
            # batch norms' statistics are rank 0's or each rank's own; training does not look at them
            assert facts[name]["losses"] == pytest.approx(facts[NATIVE]["losses"], rel=1e-5), name
        # the first step makes the momentum, the second is the steady state
        for name in (NATIVE, SHARDED_DDP, UNSYNCED, FSDP):
            assert facts[name]["compiles"] == 2, name
        collectives = {name: fact["collectives"] for name, fact in facts.items()}
        assert collectives[NATIVE] == {"all-reduce": 1}
        assert collectives[UNSYNCED] == {"reduce-scatter": 1, "all-gather": 1}
        # and buffers, of two dtypes
        assert collectives[SHARDED_DDP] == {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}
        theirs = collectives[XLA_FSDP]
        assert all(count <= theirs[kind] for kind, count in collectives[FSDP].items())
        assert facts[SHARDED_DDP]["calls"] < facts[NATIVE]["calls"]
        assert facts[FSDP]["calls"] < facts[XLA_FSDP]["calls"]
        assert facts[UNSYNCED]["operations"] <= facts[NATIVE]["operations"]
