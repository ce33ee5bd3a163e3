"""Rewrites the source of a Python module.

The syntax tree says what to replace; replaced are spans of the source itself, so that all else stays as it is.

[Note: the variable]
``import fairscale`` and ``import fairscale.nn`` bind a variable ``fairscale``, in some scope. It is renamed as a whole,
with everything else that binds or uses it there (``except ImportError: fairscale = None``). Where its name is
part of an interface (a class attribute, an argument, something in ``__all__``) or ``shardkit`` means something else in
the file, it keeps its name: ``import shardkit as fairscale``.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterable

from .interfaces import Interfaces, no_module, objection
from .marks import Marked
from .scopes import By, Scope, Seen, bindings, imports, look

_BETWEEN = r"(?:\s|\\)*"  # the parts of a path
_PATH = re.compile(r"fairscale(?:[.:]\w+)*")  # all of a string
_THROUGH = re.compile(r"\w[\w.]*\.fairscale(?:\.\w+)*")


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
    """Source in which imports of fairscale are imports of shardkit. Rewriting the result again changes nothing.

    Args:
        source: a module, without byte order mark.
        strings: also rewrite strings that are nothing but the dotted path of something shardkit has.
        xla: also rewrite imports of torch_xla's FSDP.
        torch_fsdp: also rewrite imports of torch's FSDP1.
    """
    others = Interfaces(xla, torch_fsdp)
    packages = ("fairscale", *others.packages)
    marked = Marked(source, packages)
    tree = _parsed(marked)
    for word in marked.other_spellings(packages):
        raise SyntaxError(
            f"{word!r} is a package's name to Python, in other characters: write it in plain ones"
        )
    relevant = Relevant(tree, marked, packages)
    seen, scopes = look(tree, relevant.has_words, "fairscale", relevant.names, marked.plain)
    rewriting = _Rewriting(marked, _Variables(marked, seen, scopes), strings, others)
    for at in seen:
        rewriting.look(at)
    return rewriting.result()


def _parsed(marked: Marked) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source's strings
            return ast.parse(marked.text)
    except SyntaxError as error:
        python = ".".join(map(str, sys.version_info[:2]))
        where = f"line {error.lineno}" if error.lineno else "it"
        raise SyntaxError(f"{where} is no Python {python}: {marked.plain(error.msg)}") from None


def _is_fairscale(path: str) -> bool:
    return path.split(".")[0] == "fairscale"


def _text(node: ast.AST | None) -> str | None:
    """Value of a string; None of bytes, and of what is no string."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


class _Variables:
    """Decides about every variable ``fairscale`` of a module; see [Note: the variable].

    Attributes:
        renamed: their scopes.
        kept: import aliases that have to bind the old name.
        left: import aliases that can't be changed.
    """

    def __init__(self, marked: Marked, seen: list[Seen], scopes: list[Scope]) -> None:
        self._plain = marked.plain
        self._exported = any(self._exports(at.node) for at in seen)
        self.renamed: set[Scope] = set()
        self.kept: set[ast.alias] = set()
        self.left: set[ast.alias] = set()
        bound_by: dict[Scope, list[ast.alias]] = {}
        for at in seen:
            home = at.scope.home("fairscale") if isinstance(at.node, ast.Import) else None
            for alias in at.node.names if isinstance(at.node, ast.Import) else ():
                if home is not None and alias.asname is None and _is_fairscale(self._plain(alias.name)):
                    bound_by.setdefault(home, []).append(alias)
        ours = [binding for scope in scopes for binding in scope.bound.get("shardkit", ())]
        name_is_free = all(binding.by is By.IMPORT for binding in ours)
        for scope, aliases in bound_by.items():
            if name_is_free and not self._is_interface(scope):
                self.renamed.add(scope)
            elif any("." in alias.name for alias in aliases):
                self.left.update(aliases)  # "import shardkit.nn as fairscale" would be something else
            else:
                self.kept.update(aliases)

    def _exports(self, node: ast.AST) -> bool:
        """Whether a statement puts the name into ``__all__``."""
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None or not any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return False
        return any(self._plain(_text(part) or "") == "fairscale" for part in ast.walk(node.value))

    def _is_interface(self, scope: Scope) -> bool:
        """Whether others may know the variable by its name."""
        return (
            scope.is_class
            or (self._exported and scope.is_module)
            or any(b.by in (By.DEFINITION, By.RENAMING_IMPORT) for b in scope.bound["fairscale"])
        )


class _Rewriting:
    """Collects what to replace, and what to say."""

    def __init__(self, marked: Marked, variables: _Variables, strings: bool, others: Interfaces) -> None:
        self._marked, self._variables = marked, variables
        self._strings, self._others = strings, others
        # By first character: the end, and what comes in its place.
        self._edits: dict[int, tuple[int, str]] = {}
        self._notes: set[Note] = set()
        self._said: dict[str, tuple[int, int]] = {}  # what is said once -> line and column of the first place
        self._texts: list[tuple[int, str]] = []  # mentions at the beginning of f-strings' texts
        self._uses: set[int] = set()  # mentions that are variables

    def look(self, at: Seen) -> None:
        node = at.node
        if isinstance(node, ast.Import):
            self._import(node)
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, at.scope)
        elif isinstance(node, ast.Constant):
            self._string(node, at)
        elif isinstance(node, ast.JoinedStr):
            self._formatted(node)
        elif isinstance(node, ast.Name):
            self._variable(node.id, at.scope)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                self._variable(name, at.scope)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            self._variable(node.name, at.scope)
        elif isinstance(node, ast.MatchMapping):
            self._variable(node.rest, at.scope)

    def result(self) -> Rewritten:
        for number, text in self._texts:
            if number not in self._uses:  # of f"{fairscale.nn=}" there is a text, too
                self._note_mention(number, text)
        self._notes |= {Note(line, text) for text, (line, _) in self._said.items()}
        source, kept, done = self._marked.source, [], 0
        for start, (end, new) in sorted(self._edits.items()):
            kept += [source[done:start], new]
            done = end
        changed = "".join([*kept, source[done:]]) if kept else source
        return Rewritten(changed, tuple(sorted(self._notes)))

    # ------------------------------------------------------------ imports
    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            path = self._marked.plain(alias.name)
            ours = self._others.ours(path)
            if alias in self._variables.left:
                said = "left as it is: the variable fairscale can't be renamed here; use 'from' or 'as'"
                self._notes.add(Note(alias.lineno, said))
            elif alias in self._variables.kept:
                self._replace(alias.name, "shardkit as fairscale")
            elif _is_fairscale(path):
                self._say(alias, no_module(path))
                self._replace(alias.name, "shardkit")
            elif ours and alias.asname is None:
                said = f"left as it is: to be imported as something, from {ours}"
                self._notes.add(Note(alias.lineno, said))
            elif ours:
                self._replace_path(alias.name, ours)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        path = self._marked.plain(node.module)
        names = [self._marked.plain(alias.name) for alias in node.names]
        if _is_fairscale(path):
            self._replace(node.module, "shardkit")
            for name in names:
                self._say(node, no_module(path, star=True) if name == "*" else objection(path, name))
        else:
            self._import_others(node, path, names)

    def _import_others(self, node: ast.ImportFrom, path: str, names: list[str]) -> None:
        said = self._others.objection(path, names)
        if said is not None:
            self._notes.add(Note(node.lineno, said))
            return
        ours, below = self._others.ours(path), self._others.ours(f"{path}.{names[0]}")
        if ours is None and below is not None:
            ours = below.rpartition(".")[0]
        if ours is not None:
            self._replace_path(str(node.module), ours)

    # ------------------------------------------------------------ uses
    def _variable(self, name: str | None, scope: Scope) -> None:
        """Renames a name, unless it is another variable's."""
        if name is not None and "fairscale" in name and self._marked.plain(name) == "fairscale":
            self._uses.update(self._marked.numbers(name))
            if scope.home("fairscale") in self._variables.renamed:
                self._replace(name, "shardkit")

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        """Says what there is to say about the paths that ``a.b.c`` may stand for."""
        parts: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            parts.append(root.attr)
            root = root.value
        name = self._marked.plain(root.id) if isinstance(root, ast.Name) else ""
        home = scope.home(name)
        for path in {b.path for b in home.bound[name]} if home is not None else ():
            whole = self._marked.plain(".".join([path, *reversed(parts)]))
            if _is_fairscale(path):
                self._say(node, objection(whole))
            elif parts and self._others.ours(whole) and not self._others.ours(path):
                self._say(node, f"left as it is: {whole} is {self._others.ours(whole)}, to be imported")

    # ------------------------------------------------------------ strings
    def _string(self, node: ast.Constant, at: Seen) -> None:
        text = _text(node)
        if text is None or "fairscale" not in text:
            return
        value = self._marked.plain(text)
        mentions = self._marked.numbers(text)
        home = at.scope.home("fairscale") if at.in_annotation else None
        if home is not None:
            if home in self._variables.renamed:
                for found in re.finditer(r"(?<![\w.])fairscale\w+(?=\s*\.)", text):
                    self._replace(found[0], "shardkit")
        elif _PATH.fullmatch(value):
            said = objection(value.replace(":", "."))
            if self._strings and "." in value and said is None and len(mentions) == 1:
                self._replace(text, "shardkit")
            else:
                self._note_string(
                    node, mentions, f"the string {value!r} names fairscale" + (f"; {said}" if said else "")
                )
        elif _THROUGH.fullmatch(value):
            said = f"the string {value!r} names a variable fairscale, which has another name now"
            self._note_string(node, mentions, said)

    def _note_string(self, node: ast.Constant, mentions: list[int], text: str) -> None:
        if mentions:
            self._note_mention(mentions[0], text)
        else:  # spelt with escapes
            self._notes.add(Note(node.lineno, text))

    def _formatted(self, node: ast.JoinedStr) -> None:
        for part in node.values:
            text = _text(part) or ""
            if text.startswith("fairscale") and re.match(r"fairscale\.", plain := self._marked.plain(text)):
                for number in self._marked.numbers(text)[:1]:
                    self._texts.append((number, f"the string {plain!r}... names fairscale"))

    # ------------------------------------------------------------ what is collected
    def _replace(self, name: str, new: str) -> None:
        """Replaces the first mention in a name or a text."""
        for number in self._marked.numbers(name)[:1]:
            start = self._marked.starts[number]
            self._edits[start] = start + len("fairscale"), new

    def _replace_path(self, path: str, new: str) -> None:
        """Replaces all of a path of another interface."""
        parts = map(re.escape, self._marked.plain(path).split("."))
        pattern = re.compile(rf"{_BETWEEN}\.{_BETWEEN}".join(parts))
        for number in self._marked.numbers(path)[:1]:
            if found := pattern.match(self._marked.source, self._marked.starts[number]):
                self._edits[found.start()] = found.end(), new

    def _say(self, node: ast.expr | ast.stmt | ast.alias, text: str | None) -> None:
        """Says what there is to say about a name once, at the first place."""
        if text is not None:
            here = (node.lineno, node.col_offset)
            self._said[text] = min(here, self._said.get(text, here))

    def _note_mention(self, number: int, text: str) -> None:
        self._notes.add(Note(self._marked.line(self._marked.starts[number]), text))


class Relevant:
    """Decides about the rewriting of a module.

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
