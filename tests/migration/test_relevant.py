"""What rewriting does not look at makes no difference, and little of a long file is looked at."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.migration import files, rewriting
from shardkit.migration.relevant import only_relevant

WHOLE = '''# -*- coding: utf-8 -*-
"""Docs of é"""
from __future__ import annotations
import os, fairscale.nn as fnn; import fairscale
from fairscale.optim import (
    OSS as Sharded,
)
x = 1; y = fairscale.nn.wrap; z = 3  # é
@decorated(
    1)
class A(B):
    """fairs"""
    a = 1

    # between
    b = [
        2,
    ]

    @property
    def f(self): return 1

    def g(self, é="ü"):
        if a:
            return 1
        elif b:
            é = 2
        elif fairscale.nn:
            pass
            more(1)
        elif c: fnn.FSDP(1); d()
        else:
            return Sharded.nope

        try:
            a()
        except fairscale.Error:
            b(
            )
        except C:
            fnn.nope
        else:
            c
        finally:
            \td = fairscale
        for i in range(3):
            with open(i) as fairscale:
                pass
            continue
        else:
            while True: break
        return "fairscale.nn.wrap"
\x0c
async def h(fairscale): return (
    fairscale)
def k():
    import fairscale
    def inner():
        nonlocal fairscale
        one_more = 1
        fairscale = None
        return (yield)
    return [fairscale for fairscale in inner()]
lambda: 0
if x: pass
else: fairscale.nn
f"{fairscale.nn} {x}" ; 1 + \\
    2
type_ = "a fairscale"
__all__ = ["x", "fairscale"]
'''


@pytest.mark.parametrize("source", [WHOLE, WHOLE.replace("\n", "\r\n"), WHOLE.replace('"fairscale"]', "1]")])
def test_what_is_left_out_makes_no_difference(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = only_relevant(source, ["fairscale"])
    assert left != source
    assert len(left.encode()) == len(source.encode())
    ast.parse(left)
    result = rewriting.rewrite(source, strings=True)
    monkeypatch.setattr(rewriting, "only_relevant", lambda source, packages: source)
    assert rewriting.rewrite(source, strings=True) == result
    assert result.source.count("shardkit") > 3
    assert len(result.notes) > 1


def test_statements_alone_are_left_out() -> None:
    assert (
        only_relevant("a = 1\nb\nimport fairscale\nc(\n)\n", ["fairscale"])
        == "0      \nimport fairscale\n0   \n"
    )
    assert only_relevant("from fairscale import nn as é\nx.nn\né.nn\n", ["fairscale"]).count("0") == 1


def test_names_in_other_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads mathematical letters as plain ones."""
    source = "import fairscale\nx = 1\n\U0001d4bbairscale.nn\n"
    assert only_relevant(source, ["fairscale"]) == source


def test_what_is_no_python_is_kept() -> None:
    for source in ("import fairscale\nprint 'x'\n", "import fairscale\n\0", "fairscale" + "(" * 500):
        assert only_relevant(source, ["fairscale"]) == source


def calls(path: Path) -> int:
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        assert files.migrate(path).is_changed
    finally:
        sys.setprofile(None)
    return count


def test_a_long_file_costs_little(tmp_path: Path) -> None:
    """Python calls for each line; they were 14,000 for any line."""
    lines = ["import fairscale.nn", "from fairscale.optim import OSS"]
    for k in range(1000):
        lines += [
            f"def f{k}(a, b={k}):",
            f"    x = a.b.c(torch.ones({k}), key=b)",
            "    return x + 1, 'text'",
            "",
        ]
        if k % 50 == 0:
            lines.append("y = fairscale.nn.wrap(x) if a else [i for i in x]")
    path = tmp_path / "a.py"
    path.write_text("\n".join(lines))
    long = calls(path) / len(lines)
    path.write_text("\n".join(lines[: len(lines) // 4]))
    short = calls(path) / (len(lines) // 4)
    assert long < 400, f"{long:.0f} calls a line"
    assert long < 1.3 * short, f"{long:.0f} calls a line, {short:.0f} in a file of a quarter of the lines"


def test_a_file_without_a_word_of_it_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("(" * 1000)
    assert files.migrate(path).error is None
