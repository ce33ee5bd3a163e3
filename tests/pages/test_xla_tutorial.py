"""The tutorial for XLA runs as it stands there, on two replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

from tests.pages.running import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "xla.md"
pytestmark = pytest.mark.xla


def test_page(tmp_path: Path) -> None:
    run_page(PAGE, tmp_path)
