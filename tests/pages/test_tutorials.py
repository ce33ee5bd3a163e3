"""The programs of the quick start and of the tutorials run as they stand there, on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.pages.running import run_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    DOCS / "quickstart.md",
    *sorted(set((DOCS / "tutorials").glob("*.md")) - {DOCS / "tutorials" / "xla.md"}),
]
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path) -> None:
    library = page.stem in ("transformers", "lightning")
    if library and importlib.util.find_spec(page.stem) is None:  # an import here would change the environment
        pytest.skip("needs the extra 'libraries'")
    run_page(page, tmp_path)
