"""Prints how large the house is, beside the goals: ``python -m tests.house_table``, a part of ``make check``."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("shardkit", "backends", "compat")


def files_of(*tops: str) -> list[Path]:
    """All Python files; links are not followed."""
    walks = (os.walk(ROOT / top, followlinks=False) for top in tops)
    return sorted(
        Path(at, name) for walk in walks for at, _, names in walk for name in names if name.endswith(".py")
    )


def size(files: Iterable[Path]) -> str:
    """Names lines and files."""
    lines = [path.read_text().count("\n") for path in files]
    return f"{sum(lines):,} lines, {len(lines)} files"


def shared_class_names() -> int:
    """Counts names that classes of several files have."""
    homes = defaultdict(set)
    for path in files_of(*TOPS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path)
    return sum(len(found) > 1 for found in homes.values())


def right_under_shardkit() -> str:
    """Names what a reader sees first; links are folders of backends/ and compat/."""
    entries = [e for e in (ROOT / "shardkit").iterdir() if not e.is_symlink()]
    packages = sum((e / "__init__.py").is_file() for e in entries)
    return f"{packages} packages, {sum(e.suffix == '.py' for e in entries)} files"


def docstrings_that_begin_with_what() -> int:
    """Counts them."""
    return sum(len(re.findall(r'"""What ', path.read_text())) for path in files_of(*TOPS))


def python(*arguments: str) -> tuple[str, float]:
    """Runs it; returns the output and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    program = (
        "import sys, shardkit; print(sum(m.startswith('shardkit') for m in sys.modules), len(dir(shardkit)))"
    )
    modules, names = python("-c", program)[0].split()
    rows = [
        ("source", size(files_of(*TOPS)), "63,000 lines, 340 files"),
        ("right under shardkit/", right_under_shardkit(), "16 packages, 10 files"),
        ("shardkit/fsdp/", size(files_of("shardkit/fsdp")), "6,900 lines, 20 files"),
        ("shardkit/checkpoint/", size(files_of("shardkit/checkpoint")), "6,800 lines, 30 files"),
        ("class names of several files", str(shared_class_names()), "10"),
        ('docstrings "What ..."', str(docstrings_that_begin_with_what()), "0"),
        ("import shardkit", f"{modules} modules, {names} names", "60 modules, 30 names"),
        ("shardkit --help", f"{python('-m', 'shardkit', '--help')[1]:.2f} s CPU", "0.3 s"),
        ("tests", size(files_of("tests")), "54,000 lines"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in [("", "now", "goal: at most"), *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
