"""FSDP on XLA replicas: equal to one process and to gloo, one compile, exactly the expected collectives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from shardkit import FSDP
from tests.backends import xla_fsdp_programs as programs
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


@functools.cache
def truth(name: str, world_size: int) -> dict[str, Any]:
    return programs.truth(name, world_size)


def assert_equal(name: str, world_size: int, results: list[dict[str, Any]]) -> None:
    case, one = programs.CASES[name], truth(name, world_size)
    for rank, result in enumerate(results):
        for what in ("losses", "evaluated"):
            wanted = [step[rank] for step in one[what]]
            assert result[what] == pytest.approx(wanted, rel=case.tolerance, abs=case.tolerance), (what, rank)
        assert list(result["state"]) == list(one["state"])
        tolerance = 10 * case.tolerance
        for key, value in result["state"].items():
            torch.testing.assert_close(
                value, one["state"][key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


RUNS = [(2, name) for name in programs.CASES] + [(4, name) for name in programs.ON_FOUR]


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_training_equals_one_process_and_gloo(world_size: int, name: str) -> None:
    results = rank_pool(world_size, "xla").run(programs.train, "xla", name)
    assert_equal(name, world_size, results)
    if not name.endswith("xla"):
        gloo = rank_pool(world_size, "gloo").run(programs.train, "gloo", name)
        assert_equal(name, world_size, gloo)
        tolerance = programs.CASES[name].tolerance
        for here, there in zip(results, gloo, strict=True):
            assert here["losses"] == pytest.approx(there["losses"], rel=tolerance)
    for result in results:
        compiles = result["compiles"]
        # the first step makes optimizer state, the second is the steady state
        assert compiles[-2] == compiles[1], f"compiles after each step: {compiles}"
        assert result["collectives"] == result["expected"]


@pytest.mark.parametrize("flatten", [True, False])
def test_state_goes_to_other_backends_and_numbers_of_ranks(flatten: bool) -> None:
    one = programs.plain_with_adam([2, 2, 2, 2])
    saved = rank_pool(2, "xla").run(programs.save, "xla", flatten)
    gloo = rank_pool(2, "gloo").run(programs.save, "gloo", flatten)
    full = FSDP.consolidate_shard_weights([s["local"] for s in saved], [s["metadata"] for s in saved])
    for rank, (s, g) in enumerate(zip(saved, gloo, strict=True)):
        assert s["losses"] == pytest.approx([step[rank] for step in one[:2]], rel=1e-5)
        torch.testing.assert_close(s["full"], g["full"], rtol=1e-5, atol=1e-6)
        if flatten:
            torch.testing.assert_close(s["local"], g["local"], rtol=1e-5, atol=1e-6)
            assert s["metadata"] == g["metadata"]
    torch.testing.assert_close(full, saved[0]["full"])
    torch.testing.assert_close(saved[0]["optimizer"], gloo[0]["optimizer"], rtol=1e-4, atol=1e-6)
    for backend, start in (("xla", gloo), ("gloo", saved)):
        for rank, losses in enumerate(rank_pool(2, backend).run(programs.resume, backend, flatten, start)):
            assert losses == pytest.approx([step[rank] for step in one[2:]], rel=1e-5)
    one = programs.plain_with_adam([2, 2, 4, 4])
    for rank, losses in enumerate(rank_pool(4, "xla").run(programs.resume, "xla", flatten, saved)):
        assert losses == pytest.approx([step[rank] for step in one[2:]], rel=1e-5)


@pytest.mark.parametrize("name", ["nested", "attention", "bf16"])
def test_a_compiler_finds_no_gather_that_it_can_drop_or_merge(name: str) -> None:
    """Else it would keep what forward gathered until backward."""
    for result in rank_pool(2, "xla").run(programs.on_native_collectives, name):
        assert result["collectives"] == result["expected"]
        assert result["barriers"] == result["expected"]["all-gather"]
