"""The programs of the quick start and of the tutorials run as they stand there, on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.pages.running import run_page
from tests.started import output_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    DOCS / "quickstart.md",
    *sorted(set((DOCS / "tutorials").glob("*.md")) - {DOCS / "tutorials" / "xla.md"}),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path) -> None:
    library = {"lora": "peft"}.get(page.stem, page.stem)
    is_needed = page.stem in ("transformers", "lightning", "lora")
    if is_needed and importlib.util.find_spec(library) is None:  # an import here would change the environment
        pytest.skip("needs the extra 'libraries'")
    if page.stem == "fairscale":
        _in_a_process_of_its_own(page, tmp_path)
    else:
        run_page(page, tmp_path)


def _in_a_process_of_its_own(page: Path, folder: Path) -> None:
    """It replaces fairscale, which other tests of this process have imported or want to."""
    program = (
        "from pathlib import Path; from tests.pages.running import run_page; from tests.pools import close_pools\n"
        f"run_page(Path({str(page)!r}), Path({str(folder)!r})); close_pools()"
    )
    output_of("-c", program)
