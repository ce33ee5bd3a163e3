"""Migrates files: reads them, has them rewritten, puts the result in their place at once or not at all."""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import libcst

from . import configuration, rewriting
from .rewriting import Note

__all__ = ["Migrated", "below", "migrate"]

PYTHON = frozenset({".py", ".pyi", ".pyw"})
_LARGEST_CONFIGURATION = 1 << 20  # bytes; what is larger is data
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


@dataclasses.dataclass(frozen=True)
class Migrated:
    """What became of a file; nothing is written before :meth:`written`.

    Attributes:
        before, after: its text; ``before`` where there was an error.
        encoding: what it is written in; with ``-sig``, it begins with a byte order mark.
        error: why it is left alone.
    """

    path: Path
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    notes: tuple[Note, ...] = ()
    error: str | None = None

    @property
    def is_changed(self) -> bool:
        return self.before != self.after

    def messages(self) -> Iterator[str]:
        """A line for each thing to look at."""
        if self.error is not None:
            yield f"{self.path}: left alone: {self.error}"
        for note in self.notes:
            yield f"{self.path}:{note.line}: {note.text}"

    def diff(self) -> str:
        """What :meth:`written` would change."""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )

    def written(self) -> Migrated:
        """Replaces the file (of a link, what it points to) in one move; its permissions stay.

        Returns:
            Itself, or what says why the file could not be replaced. It is whole in either case.
        """
        if not self.is_changed:
            return self
        target = os.path.realpath(self.path)
        try:
            mode = os.stat(target).st_mode
            handle, temporary = tempfile.mkstemp(
                dir=os.path.dirname(target), prefix=".shardkit-", suffix=".tmp"
            )
            try:
                with open(handle, "wb") as file:
                    file.write(self.after.encode(self.encoding))
                os.chmod(temporary, mode)
                os.replace(temporary, target)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            return Migrated(self.path, error=f"it can't be written: {error}")
        return self


def below(paths: Iterable[Path]) -> Iterator[Path]:
    """Files to look at: those that are named, and Python and configuration files below the folders that are.

    Hidden folders, virtual environments, what was built, and configuration files above 1 MiB are left out.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if _is_searched(Path(folder, f)))
            for name in sorted(names):
                if _is_searched_file(file := Path(folder, name)):
                    yield file


def _is_searched(folder: Path) -> bool:
    return not (folder.name.startswith(".") or folder.name in _SKIPPED or (folder / "pyvenv.cfg").exists())


def _is_searched_file(file: Path) -> bool:
    if file.suffix in configuration.SUFFIXES:
        return file.is_file() and file.stat().st_size <= _LARGEST_CONFIGURATION
    return file.suffix in PYTHON


def migrate(path: Path, *, strings: bool = False, xla: bool = False) -> Migrated:
    """Rewrites a file in memory. Arguments as of :func:`.rewriting.rewrite`.

    What comes out has been parsed again, and rewriting it again changed nothing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return Migrated(path, error=f"it can't be read: {error}")
    if not any(word in data for word in (b"fairscale", *((b"torch_xla",) if xla else ()))):
        return Migrated(path)
    is_python = path.suffix not in configuration.SUFFIXES
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if is_python else "utf-8"
        before = data.decode(encoding)
        if is_python:
            result = rewriting.rewrite(before, strings=strings, xla=xla)
            again = rewriting.rewrite(result.source, strings=strings, xla=xla).source
        else:
            result = configuration.rewrite(before, strings=strings)
            again = configuration.rewrite(result.source, strings=strings).source
    except (libcst.ParserSyntaxError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        return Migrated(path, error=f"it can't be read: {error}")
    if again != result.source or before.encode(encoding) != data:
        return Migrated(path, error="it can't be rewritten safely; change it by hand")
    return Migrated(path, before, result.source, encoding, result.notes)
