"""Pictures are what the script draws of runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "draw.py"


@pytest.mark.parametrize("name", ["flat_parameter", "timeline"])
def test_picture(name: str) -> None:
    spec = importlib.util.spec_from_file_location("draw", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    drawn = getattr(draw, name)()
    assert drawn == (SCRIPT.parent / f"{name}.svg").read_text(), (
        "python docs/pictures/draw.py draws them anew"
    )
