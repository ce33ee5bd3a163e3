"""Rewrites code from fairscale to shardkit: the imports of Python modules, and files, at once or not at all.

The syntax tree says what to replace; replaced are spans of the source itself, so that all else stays as it is.

[Note: the variable] ``import fairscale`` and ``import fairscale.nn`` bind a variable ``fairscale``, which may be used,
shadowed and exported anywhere. It keeps its name (``import shardkit as fairscale``), so that no scope has to be
understood.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import difflib
import functools
import importlib
import io
import os
import re
import stat
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from shardkit.checkpoint.files.writing import write_atomically
from shardkit.compat import PARTS
from shardkit.compat.redirected import MARK, is_redirected
from shardkit.errors import ConfigurationError

_BETWEEN = r"(?:\s|\\)*"  # the parts of a path
_LINE_END = re.compile(r"\r\n|\r|\n")
_PATH = re.compile(r"fairscale(?:[.:]\w+)*")  # all of a string
_WORD = re.compile(r"(?<!\w)fairscale(?!\w)")


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something for people to look at; ``line`` counts from 1."""

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The result. ``source`` is the argument itself where there was nothing to rewrite."""

    source: str
    notes: tuple[Note, ...]


def rewrite(source: str, *, strings: bool = False, xla: bool = False, torch_fsdp: bool = False) -> Rewritten:
    """Makes imports of fairscale imports of shardkit. Rewriting the result again changes nothing.

    Args:
        source: a module, without byte order mark.
        strings: also rewrite strings that are nothing but the dotted path of something shardkit has.
        xla: also rewrite imports of torch_xla's FSDP.
        torch_fsdp: also rewrite imports of torch's FSDP1.
    """
    rewriting = _Rewriting(source, _parsed(source), strings, Interfaces(xla, torch_fsdp))
    rewriting.look_at_all()
    return rewriting.result()


def _parsed(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source's strings
            return ast.parse(source)
    except SyntaxError as error:
        python = ".".join(map(str, sys.version_info[:2]))
        where = f"line {error.lineno}" if error.lineno else "it"
        raise SyntaxError(f"{where} is no Python {python}: {error.msg}") from None


def _is_fairscale(path: str) -> bool:
    return path.split(".")[0] == "fairscale"


def _bindings(tree: ast.Module) -> dict[str, set[str]]:
    """Finds what the names that imports bind, in whichever scope, may stand for."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    name, path = alias.asname or alias.name, f"{node.module}.{alias.name}"
                else:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    name = alias.asname or path
                found.setdefault(name, set()).add(path)
    return found


def _binds_our_name(node: ast.AST) -> bool:
    """Says whether a node makes ``shardkit`` mean something else than the package."""
    if isinstance(node, ast.Import):
        return any(alias.asname == "shardkit" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return any((alias.asname or alias.name) == "shardkit" for alias in node.names)
    if isinstance(node, ast.Name):
        return node.id == "shardkit" and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.alias):
        return False
    return any(getattr(node, name, None) == "shardkit" for name in ("name", "arg", "rest"))


class _Rewriting:
    """Collects what to replace, and what to say."""

    def __init__(self, source: str, tree: ast.Module, strings: bool, others: Interfaces) -> None:
        self._source, self._tree, self._strings, self._others = source, tree, strings, others
        self._lines = [0, *(m.end() for m in _LINE_END.finditer(source))]
        self._bound = _bindings(tree)
        self._is_our_name_taken = any(map(_binds_our_name, ast.walk(tree)))
        self._skipped: set[ast.AST] = set()  # looked at with what they are part of, or not at all
        # By first character: the end, and what comes in its place.
        self._edits: dict[int, tuple[int, str]] = {}
        self._notes: set[Note] = set()
        self._said: dict[str, tuple[int, int]] = {}  # what is said once -> line and column of the first place

    def look_at_all(self) -> None:
        for node in ast.walk(self._tree):  # what is outside comes first
            for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if annotation is not None:  # strings here name variables
                    self._skipped.update(n for n in ast.walk(annotation) if isinstance(n, ast.Constant))
            if node in self._skipped:
                continue
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
            elif isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.Constant):
                self._string(node)
            elif isinstance(node, ast.JoinedStr):
                # reports; before Python 3.12 the tree has wrong places for what is inside
                self._skipped.update(n for n in ast.walk(node) if isinstance(n, ast.Constant))
                for text in (part.value for part in node.values if isinstance(part, ast.Constant)):
                    if isinstance(text, str) and text.startswith("fairscale.") and not text.endswith("="):
                        self._notes.add(Note(node.lineno, f"the string {text!r}... names fairscale"))

    def result(self) -> Rewritten:
        self._notes |= {Note(line, text) for text, (line, _) in self._said.items()}
        kept, done = [], 0
        for start, (end, new) in sorted(self._edits.items()):
            kept += [self._source[done:start], new]
            done = end
        changed = "".join([*kept, self._source[done:]]) if kept else self._source
        return Rewritten(changed, tuple(sorted(self._notes)))

    # ------------------------------------------------------------ imports
    def _import(self, node: ast.Import) -> None:
        binds_variable = any(alias.name == "fairscale" and alias.asname is None for alias in node.names)
        for alias in node.names:
            ours, is_plain = self._others.ours(alias.name), alias.asname is None
            if _is_fairscale(alias.name):
                further = ""  # see [Note: the variable]
                if is_plain and "." not in alias.name:
                    further = " as fairscale"
                elif is_plain and self._is_our_name_taken:
                    said = (
                        "left as it is: the name shardkit stands for something else here; use 'from' or 'as'"
                    )
                    self._notes.add(Note(alias.lineno, said))
                    continue
                elif is_plain and not binds_variable:
                    further, binds_variable = ", shardkit as fairscale", True
                self._say(alias, no_module(alias.name))
                self._replace_path(self._start(alias), alias.name, "shardkit", further)
            elif ours and is_plain:
                said = f"left as it is: to be imported as something, from {ours}"
                self._notes.add(Note(alias.lineno, said))
            elif ours:
                self._replace_path(self._start(alias), alias.name, ours)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        path, names = node.module, [alias.name for alias in node.names]
        if _is_fairscale(path):
            for name in names:
                self._say(node, no_module(path, star=True) if name == "*" else objection(path, name))
            ours: str | None = "shardkit"
        else:
            if (said := self._others.objection(path, names)) is not None:
                self._notes.add(Note(node.lineno, said))
                return
            ours, below = self._others.ours(path), self._others.ours(f"{path}.{names[0]}")
            if ours is None and below is not None:
                ours = below.rpartition(".")[0]
        if ours is not None:
            start = self._start(node) + len("from")
            begins = re.compile(_BETWEEN).match(self._source, start)
            self._replace_path(begins.end() if begins else start, path, ours)

    def _replace_path(self, start: int, path: str, new: str, further: str = "") -> None:
        """Replaces a path, or of fairscale's its first part; ``further`` comes behind."""
        pattern = re.compile(rf"{_BETWEEN}\.{_BETWEEN}".join(map(re.escape, path.split("."))))
        if (found := pattern.match(self._source, start)) is None:
            raise SyntaxError(f"{path!r} is imported, written in other characters: write it in plain ones")
        self._edits[start] = start + len("fairscale") if _is_fairscale(path) else found.end(), new
        if further:
            self._edits[found.end()] = found.end(), further

    # ------------------------------------------------------------ uses
    def _attribute(self, node: ast.Attribute) -> None:
        parts = [node.attr]
        root = node.value
        while isinstance(root, ast.Attribute):
            self._skipped.add(root)
            parts.append(root.attr)
            root = root.value
        for path in self._bound.get(root.id, ()) if isinstance(root, ast.Name) else ():
            whole = ".".join([path, *reversed(parts)])
            if _is_fairscale(path):
                self._say(node, objection(whole))
            elif self._others.ours(whole) and not self._others.ours(path):
                self._say(node, f"left as it is: {whole} is {self._others.ours(whole)}, to be imported")

    # ------------------------------------------------------------ strings
    def _string(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or not _PATH.fullmatch(node.value):
            return
        start, end = self._start(node), self._place(int(node.end_lineno or 0), int(node.end_col_offset or 0))
        mentions = [m.start() for m in _WORD.finditer(self._source, start, end)]
        said = objection(node.value.replace(":", "."))
        if self._strings and node.value != "fairscale" and said is None and len(mentions) == 1:
            self._edits[mentions[0]] = mentions[0] + len("fairscale"), "shardkit"
        else:  # without a mention it is spelt with escapes
            line = bisect.bisect_right(self._lines, mentions[0]) if mentions else node.lineno
            text = f"the string {node.value!r} names fairscale" + (f"; {said}" if said else "")
            self._notes.add(Note(line, text))

    # ------------------------------------------------------------ what is collected
    def _place(self, line: int, column: int) -> int:
        """Finds where in the source something is, whose column the tree counts in bytes."""
        begin = self._lines[line - 1]
        return begin + len(self._source[begin : begin + column].encode()[:column].decode())

    def _start(self, node: ast.stmt | ast.expr | ast.alias) -> int:
        return self._place(node.lineno, node.col_offset)

    def _say(self, node: ast.expr | ast.stmt | ast.alias, text: str | None) -> None:
        """Says what there is to say about a name once, at the first place."""
        if text is not None:
            here = (node.lineno, node.col_offset)
            self._said[text] = min(here, self._said.get(text, here))


# ------------------------------------------------------------ interfaces of others than fairscale
# Their modules, with all below them, and where shardkit has them.
_XLA = {
    "torch_xla.distributed.fsdp": "shardkit.xla.fsdp",
    "torch_xla.distributed.zero_redundancy_optimizer": "shardkit.xla.zero_redundancy_optimizer",
}
_TORCH_FSDP = {
    "torch.distributed.fsdp": "shardkit.torch_fsdp",
    "torch.distributed.checkpoint.state_dict": "shardkit.torch_fsdp.state_dict",
}


class Interfaces:
    """Holds those that were asked for.

    Attributes:
        words: one of them is in a source that is to be rewritten.
    """

    def __init__(self, xla: bool, torch_fsdp: bool) -> None:
        self._modules = {**(_XLA if xla else {}), **(_TORCH_FSDP if torch_fsdp else {})}
        self.words = ("torch_xla",) * xla + ("fsdp", "checkpoint.state_dict") * torch_fsdp

    def ours(self, path: str) -> str | None:
        """Finds where shardkit has a module, or what is below it."""
        for theirs, ours in self._modules.items():
            if path == theirs or path.startswith(f"{theirs}."):
                return ours + path.removeprefix(theirs)
        return None

    def objection(self, path: str, names: Sequence[str]) -> str | None:
        """Returns what is to be said about ``from path import names`` in place of rewriting it; None if it works."""
        if (ours := self.ours(path)) is None:
            return self._objection_to_module(path, names)
        if path.startswith("torch_xla"):
            return None
        try:
            module = importlib.import_module(ours)
        except ImportError:
            return f"left as it is: shardkit has no {ours}"
        lacking = [n for n in names if n != "*" and not hasattr(module, n)]
        if not lacking:
            return None
        said = f"left as it is: {ours} has no {', '.join(lacking)}"
        if "fully_shard" in lacking:
            said += "; shardkit.fully_shard takes the arguments of torch's"
        return said if len(lacking) == len(names) else f"{said}; make it two imports"

    def _objection_to_module(self, path: str, names: Sequence[str]) -> str | None:
        for name in names:
            ours = self.ours(f"{path}.{name}")
            if ours is not None and len(names) > 1:
                return (
                    f"left as it is: imports more of {path.split('.')[0]} than what shardkit has; make it two"
                )
            if ours is not None and ours.rpartition(".")[2] != name:
                package, _, own = ours.rpartition(".")
                return f"left as it is: write 'from {package} import {own} as {name}'"
        return None


# ------------------------------------------------------------ names of fairscale
_VERSION = "shardkit has versions of its own, and fairscale's interface in all of them: drop this check"


def no_module(path: str, *, star: bool = False) -> str | None:
    """Returns what to say about ``import path`` or, with ``star``, ``from path import *``; None if it just works."""
    if path == "fairscale" and star:
        return "all of shardkit's own names come in, where fairscale gives none: drop this import"
    if path == "fairscale.version":
        return _VERSION
    return f"shardkit has no {_ours(path)}" if _module(path) is None else None


@functools.cache
def objection(path: str, name: str = "") -> str | None:
    """Returns what is to be said about ``from path import name``, or about using ``path``; None if it just works.

    Args:
        path: begins with ``fairscale``. Without ``name``, what is looked up in a class or a function is not judged.
        name: "" for none.
    """
    if name:
        module = _module(path)
        return no_module(path) if module is None else _object(module, path, name)
    here, at = _module("fairscale"), "fairscale"
    for part in path.split(".")[1:]:
        if not isinstance(here, ModuleType):
            return None
        if (said := _object(here, at, part)) is not None:
            return said
        at = f"{at}.{part}"
        here = getattr(here, part, None) or _module(at)
    return None


def _object(module: ModuleType, path: str, name: str) -> str | None:
    if path == "fairscale" and name not in PARTS:
        return _VERSION if "version" in name else f"shardkit has no part {name} of fairscale"
    if not hasattr(module, name) and _module(f"{path}.{name}") is None:
        return f"shardkit has no {_ours(path)}.{name}"
    found = getattr(module, name, None)
    return str(getattr(found, MARK)) if is_redirected(found) else None


@functools.cache
def _module(path: str) -> ModuleType | None:
    below = path.removeprefix("fairscale").removeprefix(".")
    if below and below.partition(".")[0] not in PARTS:
        return None
    try:
        return importlib.import_module(_ours(path))
    except ImportError:
        return None


def _ours(path: str) -> str:
    return "shardkit" + path.removeprefix("fairscale")


# ------------------------------------------------------------ files
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
    """Rewrites a file in memory. Arguments as of :func:`rewrite`.

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
            rewritten = functools.partial(rewrite, strings=strings, xla=xla, torch_fsdp=torch_fsdp)
            result = rewritten(before)
            again = rewritten(result.source).source
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
