"""Migrates files: reads them, has them rewritten, puts the result in their place at once or not at all."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import io
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardkit.checkpoint.files.writing import write_atomically
from shardkit.errors import ConfigurationError

from . import rewriting
from .rewriting import Interfaces, Note, Rewritten, objection

PYTHON = frozenset({".py", ".pyi", ".pyw"})
_LARGEST_CONFIGURATION = 1 << 20  # bytes; what is larger is data
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


@dataclasses.dataclass(frozen=True)
class Migrated:
    """Tells what became of a file; nothing is written before :meth:`written`.

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
        """Yields a line for each thing to look at."""
        if self.error is not None:
            yield f"{self.path}: left alone: {self.error}"
        for note in self.notes:
            yield f"{self.path}:{note.line}: {note.text}"

    def diff(self) -> str:
        # Lines of "patch", which end with \n alone; a form feed ends none.
        old, new = (io.StringIO(text, newline="\n").readlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}")
        end = "\n\\ No newline at end of file\n"
        return "".join(line if line.endswith("\n") else line + end for line in lines)

    def written(self) -> Migrated:
        """Replaces the file (of a link, what it points to) in one move; its permissions and its owner stay.

        Returns:
            Itself, or what says why the file could not be replaced. It is whole in either case.
        """
        if not self.is_changed:
            return self

        def check() -> None:
            if _read(self.path) != self.before.encode(self.encoding):
                raise _ChangedError

        try:
            with write_atomically(self.path, before_replacing=check) as file:
                file.write(self.after.encode(self.encoding))
        except _ChangedError:
            return Migrated(self.path, error="it has changed since it was read; run this again")
        except (OSError, ConfigurationError) as error:
            return Migrated(self.path, error=f"it can't be written: {error.__cause__ or error}")
        return self


class _ChangedError(Exception):
    """A file has other contents than were read."""


def _read(path: Path) -> bytes:
    """Returns the bytes of a regular file."""
    # Without waiting for whoever may write to a pipe; what is opened is looked at, not what had the name before.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is no regular file")
        return file.read()


def below(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields files to look at: those that are named, and Python and configuration files below the folders that are.

    Hidden folders, virtual environments, what was built, configuration files above 1 MiB, links that lead out of the
    folder, and what is no file (pipes, sockets, devices) are left out.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        top = path.resolve()
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(
                f
                for f in folders
                if not (f.startswith(".") or f in _SKIPPED or Path(folder, f, "pyvenv.cfg").exists())
            )
            for name in sorted(names):
                if _is_searched_file(file := Path(folder, name), top):
                    yield file


def _is_searched_file(file: Path, top: Path) -> bool:
    if file.suffix not in PYTHON | SUFFIXES:
        return False
    if file.is_symlink() and not file.resolve().is_relative_to(top):
        return False
    try:
        found = file.stat()
    except OSError:
        return file.suffix in PYTHON  # a link to nothing: whoever reads it says so
    small = file.suffix in PYTHON or found.st_size <= _LARGEST_CONFIGURATION
    return stat.S_ISREG(found.st_mode) and small


def migrate(path: Path, *, strings: bool = False, xla: bool = False, torch_fsdp: bool = False) -> Migrated:
    """Rewrites a file in memory. Arguments as of :func:`.rewriting.rewrite`.

    What comes out has been parsed again, and rewriting it again changed nothing.
    """
    try:
        # Looked at before it is opened: opening a device can do something.
        if not stat.S_ISREG(path.stat().st_mode):
            return Migrated(path, error="it is no regular file")
        data = _read(path)
    except OSError as error:
        return Migrated(path, error=f"it can't be read: {error}")
    words = ("fairscale", *Interfaces(xla, torch_fsdp).words)
    if not any(word.encode() in data for word in words):
        return Migrated(path)
    is_python = path.suffix not in SUFFIXES
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if is_python else "utf-8"
        before = data.decode(encoding)
        if is_python:
            rewrite = functools.partial(rewriting.rewrite, strings=strings, xla=xla, torch_fsdp=torch_fsdp)
            result = rewrite(before)
            again = rewrite(result.source).source
        else:
            result = rewrite_text(before, strings=strings)
            again = rewrite_text(result.source, strings=strings).source
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Migrated(path, error=f"it can't be read: {error}")
    if again != result.source or before.encode(encoding) != data:
        return Migrated(path, error="it can't be rewritten safely; change it by hand")
    return Migrated(path, before, result.source, encoding, result.notes)


SUFFIXES = frozenset({".cfg", ".ini", ".json", ".toml", ".txt", ".yaml", ".yml"})
_NAMED = re.compile(r"(?<![\w./-])fairscale((?:[.:][A-Za-z_]\w*)*)(?![\w/-])")


def rewrite_text(source: str, *, strings: bool = False) -> Rewritten:
    """Rewrites, with ``strings``, paths of what shardkit has, and reports them without."""
    notes: list[Note] = []

    def one(match: re.Match[str]) -> str:
        said = objection(match[0].replace(":", "."))
        if strings and match[1] and said is None:
            return f"shardkit{match[1]}"
        line = source.count("\n", 0, match.start()) + 1
        notes.append(Note(line, f"{match[0]!r} names fairscale" + (f"; {said}" if said else "")))
        return match[0]

    return Rewritten(_NAMED.sub(one, source), tuple(notes))
