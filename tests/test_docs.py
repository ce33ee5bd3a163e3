"""What the pages say of files, commands and functions is there: names move, and pages are not imported."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import lru_cache
from pathlib import Path

import pytest

import shardkit
from tests.deliberate_faults.places import symbols

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    """The page without its blocks of code, in which files are the reader's."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


@lru_cache(maxsize=1)
def modules() -> frozenset[str]:
    """All Python files, with their folders, links not followed."""
    tops = ("shardkit", "backends", "compat", "examples", "tests", "docs")
    return frozenset(
        path.relative_to(ROOT).as_posix()
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        if "__pycache__" not in path.parts
    )


@each_page
def test_modules_exist(page: Path) -> None:
    """By their path in the repository, or its end."""
    named = set(re.findall(r"[\w./-]+\.py\b", text_of(page)))
    known = {"/" + name for name in modules()} | {"/train.py"}  # the reader's
    missing = sorted(name for name in named if not any(path.endswith("/" + name) for path in known))
    assert not missing, f"{page.name} names files that are not there: {missing}"


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and to a heading in it."""
    targets = [t.partition("#") for t in re.findall(r"\]\(([^)]+)\)", text_of(page)) if "://" not in t]
    missing = [file for file, _, _ in targets if file and not (page.parent / file).exists()]
    assert not missing, f"{page.name} links to what is not there: {missing}"
    for file, _, anchor in targets:
        there = page.parent / file if file else page
        assert not anchor or anchor in anchors_of(there), (
            f"{page.name}: {there.name} has no heading #{anchor}"
        )


@lru_cache
def anchors_of(page: Path) -> frozenset[str]:
    """Of headings, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.M | re.S)
    listed = {line for tree in trees for line in tree.split() if not line.startswith(":")}
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in PAGES if DOCS in p.parents} - {"index"}
    assert pages <= listed, f"docs/index.md leaves out {sorted(pages - listed)}"


@each_page
def test_make_has_the_targets(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    calls = re.findall(r"^make ([^#\n]*)|`make ([^`]*)`", page.read_text(), re.M)
    words = [word for call in calls for word in "".join(call).split()]
    missing = [w for w in words if "=" not in w and w != "..." and w not in targets]
    assert not missing, f"{page.name} calls make {missing}"


@each_page
def test_no_blank_line_cuts_a_table(page: Path) -> None:
    """What follows a blank line is a table of its own, and begins with a head and a line of dashes."""
    blocks = re.split(r"\n\s*\n", text_of(page))
    tables = [block.strip().splitlines() for block in blocks if block.strip().startswith("|")]
    headless = [table[0] for table in tables if len(table) < 2 or not re.fullmatch(r"[\s|:-]+", table[1])]
    assert not headless, f"{page.name}: rows that belong to the table above: {headless}"


def test_faults_name_tests_that_exist() -> None:
    found = {Path(name).stem for name in modules()}
    for name in modules():
        if name.startswith("tests/"):
            found.update(re.findall(r"def (test_\w+)", (ROOT / name).read_text()))
    named = re.findall(r"`(test_\w+?)(?:\[[^`]*\]|\.py)?`", (ROOT / "docs" / "TESTING.md").read_text())
    missing = sorted(set(named) - found)
    assert named
    assert not missing, f"docs/TESTING.md names tests that are not there: {missing}"


def test_the_api_page_names_what_exists() -> None:
    named = re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert named
    for kind, name in named:
        if kind == "module":
            importlib.import_module(name)
            continue
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module or "shardkit"), attribute)
        assert inspect.isclass(found) == (kind == "class"), name


def test_the_newest_version_is_this_one() -> None:

    newest = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == shardkit.__version__


# ------------------------------------------------------------ docs/ARCHITECTURE.md
ARCHITECTURE = DOCS / "ARCHITECTURE.md"


def first_column(title: str) -> list[str]:
    """Of the table below a heading of docs/ARCHITECTURE.md."""
    below = ARCHITECTURE.read_text().split(f"\n## {title}", 1)[1].partition("\n## ")[0]
    rows = [line for line in below.splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows if "---" not in row][1:]


def test_architecture_is_read_in_one_sitting() -> None:
    assert ARCHITECTURE.read_text().count("\n") <= 300
    assert len(first_column("Concepts")) <= 15


def test_seams_are_classes() -> None:
    seams = [name.strip("`") for name in first_column("Six seams")]
    assert len(seams) == 6
    assert not [name for name in seams if name not in symbols()]


def test_walks_through_the_code() -> None:
    """Each names functions that are there, wherever."""
    walks = re.split(r"^## Walk ", ARCHITECTURE.read_text(), flags=re.M)[1:]
    assert len(walks) == 2
    for walk in walks:
        named = re.findall(r"^\| \d \| `([\w.]+)` \|", walk, re.M)
        assert len(named) >= 6
        known = {q for name in named for _, q, _ in symbols().get(name.rpartition(".")[2], ())}
        missing = [name for name in named if not any(f".{q}".endswith(f".{name}") for q in known)]
        assert not missing, f"docs/ARCHITECTURE.md: no {missing}"
