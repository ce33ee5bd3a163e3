"""Finds what a fault changes: a symbol by its name, in it the one place whose syntax tree is that of a snippet."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deliberate_faults.fault import Fault, NotAFaultError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("shardkit", "backends", "compat")


@dataclass(frozen=True)
class Place:
    """Where a fault goes.

    Attributes:
        file: path from the repository's root.
        start: first byte of what is replaced.
        stop: its end.
        new: what stands there then.
    """

    file: str
    start: int
    stop: int
    new: str

    def planted(self) -> str:
        """The file with the fault in it."""
        data = (ROOT / self.file).read_bytes()
        return (data[: self.start] + self.new.encode() + data[self.stop :]).decode()


def files(*folders: str) -> Iterator[Path]:
    """Python files of the repository, each under its own path: what links show is left out."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path


@functools.cache
def symbols() -> dict[str, list[tuple[str, str, ast.stmt]]]:
    """By their last name: file, qualified name and definition."""
    found: dict[str, list[tuple[str, str, ast.stmt]]] = {}
    for path in files(*SOURCE):
        file = str(path.relative_to(ROOT))
        for qualified, node in _defined(ast.parse(path.read_bytes()), ""):
            found.setdefault(qualified.rpartition(".")[2], []).append((file, qualified, node))
    return found


def _defined(node: ast.AST, within: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{within}{child.name}", child
            yield from _defined(child, f"{within}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, ast.Name):
                    yield f"{within}{target.id}", child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _defined(child, within)


@functools.cache
def place(fault: Fault) -> Place:
    """Finds the one place of a fault.

    Raises:
        NotAFaultError: there is none, or more than one; or what is written is no Python.
    """
    named = [
        (file, node)
        for file, qualified, node in symbols().get(fault.symbol.rpartition(".")[2], ())
        if f".{qualified}".endswith(f".{fault.symbol}")
    ]
    if not named:
        raise NotAFaultError(f"{fault.name}: no {fault.symbol} in {', '.join(SOURCE)}")
    old, new = _parsed(fault.old), _parsed(fault.new)
    as_expression = (
        len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr)
    )
    wanted: list[ast.AST] = [old[0].value] if as_expression else [*old]
    found = {
        (file, first.lineno, first.col_offset): (first, last)
        for file, node in named
        for first, last in _alike(node, wanted)
    }
    if len(found) != 1:
        raise NotAFaultError(f"{fault.name}: {fault.symbol} has {len(found)} times\n{fault.old}")
    [((file, *_), (first, last))] = found.items()
    return _placed(file, first, last, fault.new, as_expression)


def _parsed(snippet: str) -> list[ast.stmt]:
    try:
        # within a function, where "return" may stand
        [function] = ast.parse("async def f():\n" + textwrap.indent(snippet or "pass", "    ")).body
    except SyntaxError as error:
        raise NotAFaultError(f"no Python: {snippet}") from error
    return function.body


def _alike(tree: ast.AST, wanted: list[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """First and last node of each run in `tree` that reads as `wanted` does."""
    for node in ast.walk(tree):
        for _, field in ast.iter_fields(node):
            children = field if isinstance(field, list) else [field]
            for i in range(len(children) - len(wanted) + 1):
                run = children[i : i + len(wanted)]
                if isinstance(run[0], ast.AST) and _same(run, wanted):
                    yield run[0], run[-1]


def _same(found: object, wanted: object) -> bool:
    """Whether two trees are the same; `f(...)` in `wanted` is any call of `f`."""
    if type(found) is not type(wanted):
        return False
    if (
        isinstance(found, ast.Call)
        and isinstance(wanted, ast.Call)
        and list(map(ast.unparse, wanted.args)) == ["..."]
    ):
        return _same(found.func, wanted.func)
    if isinstance(wanted, ast.AST):
        return all(_same(getattr(found, f, None), getattr(wanted, f, None)) for f in wanted._fields)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return found == wanted


def _placed(file: str, first: ast.AST, last: ast.AST, new: str, as_expression: bool) -> Place:
    lines = (ROOT / file).read_bytes().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    start = starts[first.lineno - 1] + first.col_offset
    stop = starts[last.end_lineno - 1] + last.end_col_offset
    if as_expression:
        return Place(file, start, stop, new if isinstance(first, ast.Starred) else f"({new})")
    indented = textwrap.indent(new or "pass", " " * first.col_offset).lstrip()
    return Place(file, start, stop, indented)


@functools.cache
def _tests() -> dict[str, list[str]]:
    """Files by the names of their test functions."""
    found: dict[str, list[str]] = {}
    for path in files("tests"):
        if path.name.startswith("test_"):
            for name in {
                n.name for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.FunctionDef)
            }:
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def node_id(test: str) -> str:
    """What pytest calls a test that a fault names.

    Raises:
        NotAFaultError: there is no such test, or several files have one.
    """
    file, _, name = test.rpartition("::")
    known = [
        f for f in _tests().get(name.partition("[")[0], ()) if f"/{f}".endswith(f"/{file}.py" if file else "")
    ]
    if len(known) != 1:
        raise NotAFaultError(f"{test}: in {known or 'no file'}")
    return f"{known[0]}::{name}"
