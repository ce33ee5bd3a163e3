"""The digits example and the README's, as a user starts them."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from digits import STRATEGIES, DigitTransformer
from tests.started import ROOT, TORCHRUN, output_of, ran

pytest.importorskip("sklearn", reason="the example's images come with scikit-learn (extra: demo)")


def run_digits(*args: str, timeout: int = 280) -> str:
    """The example's output; fails the test if it doesn't exit with 0."""
    return output_of("examples/digits.py", *args, seconds=timeout)


def accuracies(output: str) -> dict[str, float]:
    """Held-out accuracy in percent of what was trained to the end, by strategy."""
    _, _, listed = output.partition("held-out accuracy")
    return {
        name: float(value) for name, value in re.findall(r"^  ([\w ]+?) +([\d.]+)%", listed, re.MULTILINE)
    }


def table(output: str) -> dict[str, list[int]]:
    """Bytes of parameters, gradients, state and their total, by strategy."""
    rows = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) == 8 and words[0] in ("single", *STRATEGIES):
            rows[words[0]] = [int(w.replace(",", "")) for w in words[2:6]]
    return rows


def check_bytes(output: str, ranks: int) -> None:
    """Stage 1 shards the state, stage 2 the gradients too, stage 3 the parameters too.

    In the first two a rank owns whole parameters, at most one above its share; stage 3 shares evenly.
    """
    rows = table(output)
    largest = 4 * max(p.numel() for p in DigitTransformer().parameters())
    parameters, gradients, state, total = rows["ddp"]
    assert state == pytest.approx(2 * gradients, rel=0.01)
    assert rows["oss"][2] <= state / ranks + 2 * largest
    assert rows["sharded_ddp"][2] <= state / ranks + 2 * largest
    assert rows["sharded_ddp"][1] <= gradients / ranks + largest
    assert rows["sharded_ddp"][3] < rows["oss"][3] < total
    assert parameters <= rows["sharded_ddp"][0] <= parameters * 1.01
    assert rows["fsdp"] == pytest.approx([held / ranks for held in rows["ddp"]], rel=0.01)


def test_full_runs_reach_97_percent() -> None:
    """The exit code says that all losses are those of one process; the other strategies run one epoch."""
    output = run_digits("--strategy", "fsdp")
    reached = accuracies(output)
    assert list(reached) == ["one process", "fsdp"]
    assert min(reached.values()) >= 97.0
    check_bytes(output, ranks=2)


def test_all_strategies_on_four_ranks() -> None:
    output = run_digits("--backend", "simulated", "--epochs", "1", "--ranks", "4")
    assert list(accuracies(output)) == ["one process", *STRATEGIES]
    check_bytes(output, ranks=4)


def test_under_torchrun() -> None:
    output = output_of(*TORCHRUN, "examples/digits.py", "--epochs", "1")
    assert output.count("2 ranks on gloo, held-out accuracy") == 1  # rank 0 reports
    check_bytes(output, ranks=2)


def test_torchrun_with_another_number_of_ranks_is_refused() -> None:
    result = ran(*TORCHRUN, "examples/digits.py", "--ranks", "4")
    assert result.returncode != 0
    assert "--ranks 4, but torchrun started 2" in result.stderr


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus() -> None:
    assert min(accuracies(run_digits("--backend", "cuda")).values()) >= 97.0


@pytest.mark.xla
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla")
def test_on_xla_replicas() -> None:
    output = run_digits("--backend", "xla", "--epochs", "1", timeout=480)
    rows = table(output)
    assert rows["sharded_ddp"][2] <= rows["ddp"][2] / 2 * 1.1
    assert rows["fsdp"] == pytest.approx([held / 2 for held in rows["ddp"]], rel=0.01)


def test_bad_arguments_are_refused() -> None:
    result = ran("examples/digits.py", "--ranks", "3")
    assert result.returncode == 2
    assert "multiple of the ranks" in result.stderr


def test_rewards_are_learned_and_an_engine_keeps_up() -> None:
    """Changes are applied to what the engine had, so a lost one would end in an error about checksums."""
    output = output_of("examples/char_rewards.py", "--ranks", "3", "--steps", "41")
    course = re.findall(r"step (\d+): reward ([\d.]+), (\d+) bytes", output)
    assert [int(step) for step, _, _ in course] == [0, 10, 20, 30, 40]
    (_, first, whole), (_, last, changed) = course[0], course[-1]
    assert float(first) < 0.5 < 0.9 < float(last)
    assert int(changed) < int(whole)


def test_readme_example(tmp_path: Path) -> None:
    """The README's program runs as it stands there, without a warning, and both ranks end with a small loss."""
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "readme_example.py"
    script.write_text(program)
    result = ran(str(script), folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    losses = ast.literal_eval(result.stdout.splitlines()[-1])  # older gloo prints a line a rank first
    assert len(losses) == 2
    assert max(losses) < 1.0  # the variance of the sum of eight standard normals is 8
