"""Leaves out what rewriting need not look at, since libcst takes milliseconds for a line.

A statement that has none of some words in it can't be rewritten and decides nothing: it neither binds nor uses the
variables that rewriting asks for. Such statements become ``0`` and spaces, byte for byte as long, so that what is found
in the rest stands where it stands in the source.
"""

from __future__ import annotations

import ast
import bisect
import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator

__all__ = ["only_relevant"]

_LINE_END = re.compile(rb"\r\n|\r|\n")


def only_relevant(source: str, packages: Iterable[str]) -> str:
    """The source without statements that name neither a package, nor what is imported from one, nor shardkit.

    Args:
        source: a module, without byte order mark.
        packages: names of packages whose imports are rewritten.

    Returns:
        As many bytes of UTF-8; the source itself where it can't be told.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    packages = set(packages)
    bound = {name for statement in _all(tree.body) for name in _bound(statement, packages)}
    pattern = _pattern(packages | {"shardkit"}, bound)
    encoded = source.encode()
    found = [m.start() for m in pattern.finditer(encoded)]
    if not source.isascii():
        normal = unicodedata.normalize("NFKC", source).encode()
        if len(pattern.findall(normal)) != len(found):
            return source  # Python takes other characters for a name, too
    blanks = _Blanks(encoded, found)
    blanks.block(tree.body)
    return blanks.result()


def _pattern(anywhere: set[str], alone: set[str]) -> re.Pattern[bytes]:
    """Packages are looked for in strings, too; what imports bind is looked for as a word."""
    parts = [re.escape(w) for w in sorted(anywhere)]
    if alone:
        parts.append(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(alone)))})(?!\w)")
    return re.compile("|".join(parts).encode())


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _all(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    todo = [block]
    while todo:
        for statement in todo.pop():
            yield statement
            todo.extend(_blocks(statement))


def _bound(statement: ast.stmt, packages: set[str]) -> Iterator[str]:
    """The names that an import of one of the packages binds."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return
    module = getattr(statement, "module", None) or ""
    for alias in statement.names:
        if any(package in f"{module}.{alias.name}" for package in packages):
            yield alias.asname or alias.name.partition(".")[0]


class _Blanks:
    """Overwrites statements of a source. ``found``: where the words in it begin, in order."""

    def __init__(self, source: bytes, found: list[int]) -> None:
        self._source, self._found = source, found
        self._lines = [0, *(m.end() for m in _LINE_END.finditer(source))]
        self._spans: list[tuple[int, int]] = []

    def block(self, statements: list[ast.stmt]) -> None:
        """Overwrites those without a word, neighbours together, and looks into the others."""
        first: int | None = None
        end = 0
        for statement in statements:
            begin, last = self._span(statement)
            if self._has_word(begin, last):
                self._overwrite(first, end)
                first = None
                self._enter(statement)
            else:
                first, end = begin if first is None else first, last
        self._overwrite(first, end)

    def _enter(self, statement: ast.stmt) -> None:
        for block in _blocks(statement):
            if self._is_elif(block):
                self._enter(block[0])
            else:
                self.block(block)

    def result(self) -> str:
        """The source, as long as it was."""
        kept, done = [], 0
        for begin, end in sorted(self._spans):
            kept += [self._source[done:begin], b"0".ljust(end - begin)]
            done = end
        return b"".join([*kept, self._source[done:]]).decode()

    def _span(self, statement: ast.stmt) -> tuple[int, int]:
        line = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        begin = self._lines[line - 1] + statement.col_offset
        return begin, self._lines[int(statement.end_lineno or 0) - 1] + int(statement.end_col_offset or 0)

    def _has_word(self, begin: int, end: int) -> bool:
        k = bisect.bisect_left(self._found, begin)
        return k < len(self._found) and self._found[k] < end

    def _is_elif(self, block: list[ast.stmt]) -> bool:
        """Which is no statement in the source."""
        return (
            len(block) == 1
            and isinstance(block[0], ast.If)
            and self._source.startswith(b"elif", self._span(block[0])[0])
        )

    def _overwrite(self, begin: int | None, end: int) -> None:
        if begin is not None:
            self._spans.append((begin, end))
