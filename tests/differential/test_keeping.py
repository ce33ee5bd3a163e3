"""What drawing finds comes back as a test that fails in the same way."""

from __future__ import annotations

import runpy
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.differential import keeping
from tests.programs.spec import Program, Sharded, Step, Train, stack


def check(program: Program, dtype: torch.dtype, limit: float) -> None:
    if len(program.steps) > 1:
        raise AssertionError(f'"{dtype}" has more than\n{limit}')


STEPS = st.lists(st.sampled_from([Train(), Train("sum"), Step()]), max_size=4).map(tuple)
PROGRAMS = st.builds(Program, st.just(stack("linear", "norm")), options=st.just(Sharded()), steps=STEPS)


def test_a_failure_is_kept_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "FOUND", tmp_path / "found")
    monkeypatch.setattr(keeping, "_KEEPING", True)
    kept = keeping.kept(check)

    @hypothesis.settings(database=None, deadline=None)
    @hypothesis.given(PROGRAMS)
    def draw(program: Program) -> None:
        kept(program, torch.float16, limit=float("inf"))

    with pytest.raises(AssertionError):
        draw()
    (path,) = (tmp_path / "found").glob("test_*.py")
    text = path.read_text()
    assert text.count("Train()") == 2  # the smallest that fails
    found = runpy.run_path(str(path))
    with pytest.raises(AssertionError, match="float16"):
        found["test_found"]()


def test_nothing_is_kept_in_a_normal_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "FOUND", tmp_path / "found")
    with pytest.raises(AssertionError):
        keeping.kept(check)(Program(stack("linear"), steps=(Train(), Step())), torch.float16, 1.0)
    assert not (tmp_path / "found").exists()
