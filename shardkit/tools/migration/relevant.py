"""Tells which statements need a look: few of a long file's, as a rule, and a look takes longer than parsing."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterable

from .marks import Marked
from .scopes import bindings, imports


class Relevant:
    """What decides about the rewriting of a module.

    A statement that stands on no line with one of some words can't be rewritten, and neither binds nor uses the
    variables that rewriting asks for.

    Attributes:
        names: "shardkit", and what is imported from a package.
    """

    def __init__(self, tree: ast.Module, marked: Marked, packages: Iterable[str]) -> None:
        self._lines = sorted({marked.line(start) for start in marked.starts})
        self.names = {"shardkit"}
        if not self._lines:
            return
        for statement in imports(tree, self.has_words):
            module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else ""
            if any(p in f"{module}.{alias.name}" for p in packages for alias in statement.names):
                self.names |= {marked.plain(name) for name, _ in bindings(statement)}
        words = "|".join(map(re.escape, sorted(self.names | marked.other_spellings(self.names))))
        found = re.finditer(rf"(?<!\w)(?:{words})(?!\w)", marked.source)
        self._lines = sorted({*self._lines, *(marked.line(m.start()) for m in found)})

    def has_words(self, statement: ast.stmt) -> bool:
        """Whether a statement needs a look."""
        first = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([first, *(d.lineno for d in statement.decorator_list)])
        k = bisect.bisect_left(self._lines, first)
        return k < len(self._lines) and self._lines[k] <= int(statement.end_lineno or 0)
