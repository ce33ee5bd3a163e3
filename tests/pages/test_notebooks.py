"""The notebooks run, on simulated ranks, and show what a run shows."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'docs'")
pytest.importorskip("nbclient", reason="needs the extra 'docs'")
pytest.importorskip("ipykernel", reason="needs the extra 'docs'")

from tests.pages.notebooks import executed, shown  # noqa: E402


def test_notebooks(tmp_path: Path) -> None:
    """What they show is refreshed by ``python -m tests.pages.notebooks``."""
    ran = executed(tmp_path)
    assert len(ran) == 3
    for path, cells in ran.items():
        for k, (cell, run) in enumerate(zip(nbformat.read(path, as_version=4).cells, cells, strict=True)):
            if cell.cell_type == "code":
                assert shown(run) == shown(cell), f"{path.name}, cell {k}"
