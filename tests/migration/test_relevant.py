"""What rewriting does not look at makes no difference, and long files cost little."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.tools.migration import files, rewriting
from shardkit.tools.migration.marks import Marked
from shardkit.tools.migration.rewriting import Relevant

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
    result = rewriting.rewrite(source, strings=True)
    left = looked_at(source)
    assert len(left) < sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))
    monkeypatch.setattr(Relevant, "has_words", lambda self, statement: True)
    assert rewriting.rewrite(source, strings=True) == result
    assert result.source.count("shardkit") > 3
    assert len(result.notes) > 1


def looked_at(source: str) -> list[int]:
    """Lines of the statements that need a look."""
    marked = Marked(source, ["fairscale"])
    tree = ast.parse(marked.text)
    relevant = Relevant(tree, marked, ["fairscale"])
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt) and relevant.has_words(n)]


def test_statements_alone_are_left_out() -> None:
    assert looked_at("a = 1\nb\nimport fairscale\nc(\n)\n") == [3]
    assert looked_at("from fairscale import nn as \u00e9\nx.nn\n\u00e9.nn\n@a\n@\u00e9\ndef f(): pass\n") == [
        1,
        3,
        6,
    ]
    assert looked_at("import fairscale as fi\n\ufb01.nn\nif x:\n  shardkit = 3\n  y = 3\n") == [1, 2, 3, 4]
    assert looked_at("import os\nshardkit = os\n") == []


def half(lines: int) -> Iterator[str]:
    """Functions and comprehensions, of which every second line names the package."""
    yield "import fairscale.nn\nfrom fairscale.optim import OSS\n"
    for k in range(lines // 4):
        yield f"def f{k}(a, b={k}):\n    x = fairscale.nn.wrap(a.b.c(torch.ones({k}), key=b))\n    return x + 1\n"
        yield f"y{k} = [OSS(x, fairscale.optim.OSS) for x in range({k})]\n"


def few(lines: int) -> Iterator[str]:
    """Little of the package."""
    yield "import fairscale.nn\n"
    for k in range(lines // 4):
        yield f"def f{k}(a, b={k}):\n    x = a.b.c(torch.ones({k}), key=b)\n    return x + 1, 'text'\n\n"
    yield "y = fairscale.nn.wrap(x) if a else [i for i in x]\n"


def uses(lines: int) -> Iterator[str]:
    """One import, used everywhere."""
    yield "from fairscale.nn import FullyShardedDataParallel as FSDP\nimport fairscale.nn as fnn\n"
    yield from (f"m{k} = FSDP(fnn.wrap(layer({k})), flatten=True)\n" for k in range(lines))


def one_class(lines: int) -> Iterator[str]:
    yield "import fairscale\nclass A(torch.nn.Module):\n"
    for k in range(lines // 5):
        yield f'    def m{k}(self, a, *, b=None):\n        "Docs."\n        if a is None:\n'
        yield f"            return fairscale.nn.wrap(self.z[{k}](b, key=a))\n        return [v for v in self.w if v]\n"


def one_statement(lines: int) -> Iterator[str]:
    yield "import fairscale\nDATA = {\n"
    yield from (f"    'k{k}': ({k}, 'text', [1.5, -2], None),\n" for k in range(lines))
    yield "    'last': fairscale.nn,\n}\n"


def deep(lines: int) -> Iterator[str]:
    """Blocks in blocks."""
    yield "import fairscale\n"
    for k in range(lines // 2):
        by = "  " * (k % 25)
        yield f"{by}if fairscale.x{k}(a):\n"
        yield f"{by}  def f{k}(a=(((fairscale.nn.wrap(a[{k}](b(c(d)))))))): return fairscale\n"


def strings(lines: int) -> Iterator[str]:
    """Strings and comments."""
    yield "import fairscale\nx = ["
    for _ in range(lines // 4):
        yield "    'fairscale.nn.wrap',  # fairscale.nn\n    # import fairscale\n"
        yield "    'about fairscale and more', b'fairscale.nn',\n    f'fairscale.nn.{x}',\n"
    yield "]\n"


def calls(path: Path) -> int:
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()  # what other tests left calls functions as it goes
    gc.disable()
    sys.setprofile(counted)
    try:
        assert files.migrate(path).is_changed
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("form", [half, few, uses, one_class, one_statement, deep, strings])
def test_a_long_file_costs_little(form: Callable[[int], Iterator[str]], tmp_path: Path) -> None:
    """Python calls for each line; with a syntax tree in Python they were thousands."""
    path = tmp_path / "a.py"

    def per_line(lines: int) -> float:
        path.write_text("".join(form(lines)))
        return calls(path) / lines

    per_line(10)  # what is looked up once
    short, long = per_line(200), per_line(1000)
    assert long < 90, f"{long:.0f} calls a line"
    assert long < 1.1 * short, f"{long:.0f} calls a line, {short:.0f} in a file of a fifth of the lines"


def test_a_file_without_a_word_of_it_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("(" * 1000)
    assert files.migrate(path).error is None
