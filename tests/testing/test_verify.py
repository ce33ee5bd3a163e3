"""verify: what it says of experiments that are right, that go wrong, and that can't run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardkit.errors import ConfigurationError, RankFailedError
from shardkit.tools.cli import main
from shardkit.tools.verify import (
    EXACT,
    Difference,
    Experiment,
    Strategy,
    Tolerance,
    Verifier,
    check_tensor,
    load_experiment,
    verify,
)
from tests.testing.experiments import broken, for_fairscale, in_order, not_in_order, right, wrong

HERE = Path(__file__).with_name("experiments.py")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(2) as kept:
        yield kept


@pytest.mark.parametrize("strategy", ["oss", "sharded_ddp", "fsdp", "fully_shard"])
def test_what_is_right(verifier: Verifier, strategy: Strategy) -> None:
    report = verifier.verify(right, strategy=strategy)
    assert report.agrees, str(report)
    assert "shardkit agrees with one process" in str(report)
    for side in report.sides:
        assert side.agrees, str(report)


def test_a_model_written_for_fairscale_and_options_of_the_wrapper(verifier: Verifier) -> None:
    for options in ({"reshard_after_forward": False}, {"mixed_precision": True}):
        report = verifier.verify(for_fairscale, options=options)
        assert all(side.agrees for side in report.sides), str(report)


def test_where_fairscale_fails(verifier: Verifier) -> None:
    """A layer that nobody uses, not flattened: it loses count of its full parameters."""
    report = verifier.verify(for_fairscale, options={"flatten_parameters": False})
    assert report.agrees, str(report)
    for side in report.sides[1:]:
        assert "AssertionError" in side.failure
        assert "fairscale failed: AssertionError" in str(report)


def test_where_it_goes_wrong(verifier: Verifier) -> None:
    """The first gradient after the hook is named, in the model's order, on each side."""
    report = verifier.verify(wrong, strategy="sharded_ddp", steps=2)
    assert not report.agrees
    for side in report.sides:
        parting = side.parting
        assert parting is not None
        assert (parting.step, parting.what) == (0, "gradient of into.weight")
        assert parting.gap > 1e-3
    assert report.between is None  # both in the same way
    assert "shardkit leaves one process at step 0, gradient of into.weight, by" in str(report)


def test_fully_shard_that_goes_wrong(verifier: Verifier) -> None:
    report = verifier.verify(wrong, strategy="fully_shard", steps=2)
    (side,) = report.sides  # fairscale has no such thing
    assert side.parting is not None
    assert (side.parting.step, side.parting.what) == (0, "gradient of into.weight")
    assert "fairscale has no fully_shard: not compared with it" in str(report)


@pytest.mark.parametrize("strategy", ["sharded_ddp", "fsdp", "fully_shard"])
def test_bits(verifier: Verifier, strategy: Strategy) -> None:
    """On two ranks they are one's; a factor of 1 + 2**-23 is told by its first element."""
    report = verifier.verify(in_order, strategy=strategy, bits=True)
    assert "shardkit agrees with one process to the bit" in str(report)
    assert "fairscale has no fixed order of sums: not compared with it" in str(report)
    (side,) = verifier.verify(not_in_order, strategy=strategy, bits=True).sides
    assert side.parting is not None
    assert side.parting.what.startswith("gradient of blocks.0.weight, element ")
    assert 0.0 < side.parting.gap < 1e-6


def test_what_counts_as_the_same_can_be_told(verifier: Verifier) -> None:
    assert verifier.verify(wrong, strategy="sharded_ddp", steps=1, tolerance=Tolerance(10.0, 10.0)).agrees


def test_bits_of_every_shape() -> None:
    for t in (torch.zeros(()), torch.zeros(2, 3)[:, 1], torch.zeros(0)):
        check_tensor("it", t, t.clone(), EXACT)
    with pytest.raises(Difference, match=r"it, element 0: -0\.0 instead of 0\.0"):
        check_tensor("it", -torch.zeros(()), torch.zeros(()), EXACT)


def test_a_file_or_a_module() -> None:
    for target in (f"{HERE}:right", "tests.testing.experiments:fixed"):
        assert isinstance(load_experiment(target), Experiment)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("experiments.py", "script.py:name or package.module:name"),
        ("no/such/file.py:right", "no file 'no/such/file.py'"),
        ("no_such_module:right", "no module 'no_such_module'"),
        (f"{HERE}:missing", "has no 'missing'"),
        (f"{HERE}:nothing", "gives a int; it has to give a shardkit.tools.verify.Experiment"),
    ],
)
def test_targets_that_are_none(target: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_experiment(target)
    assert says in str(raised.value)


def test_what_fails_without_any_wrapper_is_no_verdict(verifier: Verifier) -> None:
    with pytest.raises(RankFailedError, match="grad can be implicitly created only for scalar outputs"):
        verifier.verify(broken)
    with pytest.raises(RankFailedError, match="no module 'no_such_module'"):
        verifier.verify("no_such_module:right")


def test_arguments(verifier: Verifier) -> None:
    with pytest.raises(
        ConfigurationError, match="strategy must be one of oss, sharded_ddp, fsdp, fully_shard, got 'ddp'"
    ):
        verifier.verify(right, strategy="ddp")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least 1"):
        verifier.verify(right, steps=0)
    with pytest.raises(ConfigurationError, match="no fixed order; take sharded_ddp"):
        verifier.verify(in_order, strategy="oss", bits=True)
    with pytest.raises(ConfigurationError, match="world_size must be at least 1, got 0"):
        verify(right, world_size=0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", f"{HERE}:wrong", "--steps", "1", "--strategy", "sharded_ddp"]
    assert main([*command, "--option", "reduce_buffer_size=0"]) == 1
    printed = capsys.readouterr().out
    assert "1 step on 2 ranks with sharded_ddp" in printed
    assert "shardkit leaves one process at step 0, gradient of into.weight" in printed


def test_the_command_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    for option, says in (
        ("half", "NAME=VALUE"),
        ("compute_dtype=half16", "neither a Python value nor a dtype"),
    ):
        assert main(["verify", f"{HERE}:right", "--option", option]) == 2
        assert says in capsys.readouterr().err
