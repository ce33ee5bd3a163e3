"""A source whose mentions of packages are numbered, so that a syntax tree of it says which mention is what.

Python's tree gives no place for names after ``except ... as``, ``global``, ``from`` and the like, and before 3.12 wrong
ones inside of f-strings. Here the names themselves tell: the third ``fairscale`` of a source is ``fairscale_..._2_`` in
the tree, be it a variable, a part of a path, or in a string.
"""

from __future__ import annotations

import bisect
import hashlib
import re
import unicodedata
from collections.abc import Container, Iterable

_OTHER_WORD = re.compile(r"\w*[^\W\x00-\x7f]\w*")
_LINE_END = re.compile(r"\r\n|\r|\n")


class Marked:
    """A source and its numbered text.

    Attributes:
        source: as it is in the file.
        text: the same with a mark after each mention; as many lines.
        starts: where in ``source`` each mention begins.
    """

    def __init__(self, source: str, packages: Iterable[str]) -> None:
        # What depends on the source can't be in it, nor be made by escapes in its strings.
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._mark = re.compile(rf"_{digest}_([0-9]+)_")
        word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, packages))})(?!\w)")
        self.source = source
        self.starts: list[int] = []

        def mark(found: re.Match[str]) -> str:
            self.starts.append(found.start())
            return f"{found[0]}_{digest}_{len(self.starts) - 1}_"

        self.text = word.sub(mark, source)
        self._lines = [0, *(m.end() for m in _LINE_END.finditer(source))]

    def plain(self, text: str) -> str:
        """A name or a text of the tree as it is in the source."""
        return self._mark.sub("", text) if "_" in text else text

    def numbers(self, text: str) -> list[int]:
        """Which mentions are in a name or a text of the tree."""
        return [int(m[1]) for m in self._mark.finditer(text)] if "_" in text else []

    def other_spellings(self, names: Container[str]) -> set[str]:
        """Words in other characters that Python takes for some names: it reads mathematical letters as plain ones."""
        if self.source.isascii():
            return set()
        words = set(_OTHER_WORD.findall(self.source))
        return {word for word in words if unicodedata.normalize("NFKC", word) in names}

    def line(self, start: int) -> int:
        """The line of a place in the source, from 1."""
        return bisect.bisect_right(self._lines, start)
