"""Rewrites the source of a Python module.

The syntax tree says what to replace; replaced are spans of the source itself, so that all else stays as it is.

[Note: the variable]
``import fairscale`` and ``import fairscale.nn`` bind a variable ``fairscale``, in some scope. It is renamed as a whole,
with everything else that binds or uses it there (``except ImportError: fairscale = None``). Where its name is
part of an interface (a class attribute, an argument, something in ``__all__``) or ``shardkit`` means something else in
the file, it keeps its name: ``import shardkit as fairscale``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import libcst as cst
from libcst.metadata import (
    BaseAssignment,
    ByteSpanPositionProvider,
    ClassScope,
    CodeSpan,
    MetadataWrapper,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from .relevant import only_relevant
from .served import no_module, objection

__all__ = ["Note", "Rewritten", "rewrite"]

# torch_xla's modules that shardkit has under names of its own, with all below them.
XLA = {
    "torch_xla.distributed.fsdp": "shardkit.xla.fsdp",
    "torch_xla.distributed.zero_redundancy_optimizer": "shardkit.xla.zero_redundancy_optimizer",
}
_PATH = re.compile(r"fairscale(?:[.:]\w+)*")  # all of a string
_THROUGH = re.compile(r"\w[\w.]*\.fairscale(?:\.\w+)*")


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something for people to look at; ``line`` counts from 1."""

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What came out. ``source`` is the argument itself where there was nothing to rewrite."""

    source: str
    notes: tuple[Note, ...]


def rewrite(source: str, *, strings: bool = False, xla: bool = False) -> Rewritten:
    """Source in which imports of fairscale are imports of shardkit. Rewriting the result again changes nothing.

    Args:
        source: a module, without byte order mark.
        strings: also rewrite strings that are nothing but the dotted path of something shardkit has.
        xla: also rewrite imports of torch_xla's FSDP.

    Raises:
        libcst.ParserSyntaxError: the source is no Python.
    """
    packages = ("fairscale", "torch_xla") if xla else ("fairscale",)
    try:
        tree = _Tree(only_relevant(source, packages))
    except cst.ParserSyntaxError:
        tree = _Tree(source)  # which says where
    visitor = _Visitor(tree, _Variables(tree), strings, xla)
    tree.module.visit(visitor)
    encoded = source.encode()
    notes = {Note(encoded.count(b"\n", 0, start) + 1, text) for start, text in visitor.notes}
    for (start, length), new in sorted(visitor.edits.items(), reverse=True):
        encoded = encoded[:start] + new.encode() + encoded[start + length :]
    return Rewritten(encoded.decode() if visitor.edits else source, tuple(sorted(notes)))


def dotted(node: cst.BaseExpression | None) -> str | None:
    """``a.b.c`` of such an expression; None of any other."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr.value}"
    return None


def _root(node: cst.BaseExpression) -> cst.BaseExpression:
    return _root(node.value) if isinstance(node, cst.Attribute) else node


def _is_fairscale(path: str | None) -> bool:
    return path is not None and path.split(".")[0] == "fairscale"


class _Tree:
    """A module's syntax tree, and what libcst knows about its nodes."""

    def __init__(self, source: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._scopes = wrapper.resolve(ScopeProvider)
        self._spans = wrapper.resolve(ByteSpanPositionProvider)

    def span(self, node: cst.CSTNode) -> CodeSpan:
        """Where it stands, in bytes of UTF-8."""
        return self._spans[node]

    def imported_as(self, node: cst.Attribute) -> list[str]:
        """The paths by which an expression may have been imported."""
        scope = self._scopes.get(node)
        names = scope.get_qualified_names_for(node) if scope is not None and dotted(node) else ()
        return [n.name for n in names if n.source is QualifiedNameSource.IMPORT]

    def home(self, node: cst.CSTNode) -> Scope | None:
        """The scope of the variable ``fairscale`` that a node sees; None for what sees no variables."""
        scope = self._scopes.get(node)
        return next((a.scope for a in scope["fairscale"]), None) if scope is not None else None

    def assigned(self, name: str) -> list[BaseAssignment]:
        """All that binds a name, in any scope."""
        scopes = {scope for scope in self._scopes.values() if scope is not None}
        return [a for scope in scopes for a in scope.assignments[name]]


class _Variables(cst.CSTVisitor):
    """Decides about every variable ``fairscale`` of a module; see [Note: the variable].

    Attributes:
        renamed: their scopes.
        kept: import aliases that have to bind the old name.
        left: import aliases that can't be changed.
    """

    def __init__(self, tree: _Tree) -> None:
        super().__init__()
        self._tree = tree
        self._bound_by: dict[Scope, list[cst.ImportAlias]] = {}
        self._exported = False
        self.renamed: set[Scope] = set()
        self.kept: list[cst.ImportAlias] = []
        self.left: list[cst.ImportAlias] = []
        tree.module.visit(self)
        name_is_free = all(_imports_shardkit(a) for a in tree.assigned("shardkit"))
        for scope, aliases in self._bound_by.items():
            if name_is_free and not self._is_interface(scope):
                self.renamed.add(scope)
            elif any(isinstance(a.name, cst.Attribute) for a in aliases):
                self.left += aliases  # "import shardkit.nn as fairscale" would be something else
            else:
                self.kept += aliases

    def visit_Import(self, node: cst.Import) -> None:
        home = self._tree.home(node)
        for alias in node.names:
            if home is not None and alias.asname is None and _is_fairscale(dotted(alias.name)):
                self._bound_by.setdefault(home, []).append(alias)

    def visit_Assign(self, node: cst.Assign) -> None:
        if any(dotted(target.target) == "__all__" for target in node.targets) and isinstance(
            node.value, (cst.List, cst.Tuple)
        ):
            self._exported |= any(_text(e.value) == "fairscale" for e in node.value.elements)

    def _is_interface(self, scope: Scope) -> bool:
        """Whether others may know the variable by its name."""
        nodes = [getattr(a, "node", None) for a in scope.assignments["fairscale"]]
        return (
            isinstance(scope, ClassScope)
            or (self._exported and scope is scope.globals)
            or any(
                isinstance(n, (cst.Param, cst.FunctionDef, cst.ClassDef)) or _imports_another(n)
                for n in nodes
            )
        )


def _text(node: cst.CSTNode) -> str | None:
    """Value of a string; None of bytes, and of what is no string."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


class _Visitor(cst.CSTVisitor):
    """Collects what to replace, and what to say.

    Attributes:
        edits: (first byte, length) -> what comes in its place.
        notes: (first byte, text).
    """

    def __init__(self, tree: _Tree, variables: _Variables, strings: bool, xla: bool) -> None:
        super().__init__()
        self._tree, self._variables = tree, variables
        self._strings, self._xla = strings, xla
        self.edits: dict[tuple[int, int], str] = {}
        self.notes: set[tuple[int, str]] = set()
        self._said: set[str] = set()
        self._annotations = 0

    def _rename(self, node: cst.CSTNode, seen_from: cst.CSTNode) -> None:
        if self._tree.home(seen_from) in self._variables.renamed:
            self._replace(node, "shardkit")

    # ------------------------------------------------------------ imports
    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            path = dotted(alias.name)
            if path is None:
                continue
            if alias in self._variables.left:
                self._note(
                    alias, "left as it is: the variable fairscale can't be renamed here; use 'from' or 'as'"
                )
            elif alias in self._variables.kept:
                self._replace(alias.name, "shardkit as fairscale")
            elif _is_fairscale(path):
                self._say(alias, no_module(path))
                self._replace(_root(alias.name), "shardkit")
            elif self._xla and _xla(path) and alias.asname is None:
                self._note(alias, f"left as it is: to be imported as something, from {_xla(path)}")
            elif self._xla and _xla(path):
                self._replace(alias.name, str(_xla(path)))
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        path = dotted(node.module)
        if node.relative or node.module is None or path is None:
            return False
        names = [] if isinstance(node.names, cst.ImportStar) else [str(dotted(a.name)) for a in node.names]
        if _is_fairscale(path):
            self._replace(_root(node.module), "shardkit")
            for name in names:
                self._say(node, objection(path, name))
            if not names:
                self._say(node, no_module(path, star=True))
        elif self._xla:
            self._rewrite_xla(node, path, names)
        return False

    def _rewrite_xla(self, node: cst.ImportFrom, path: str, names: list[str]) -> None:
        ours = _xla(path)
        if ours is None and any(_xla(f"{path}.{name}") for name in names):
            if len(names) > 1:
                self._note(
                    node, "left as it is: imports more of torch_xla than what shardkit has; make it two"
                )
                return
            ours = str(_xla(f"{path}.{names[0]}")).rpartition(".")[0]
        if ours is not None and node.module is not None:
            self._replace(node.module, ours)

    # ------------------------------------------------------------ uses
    def visit_Name(self, node: cst.Name) -> None:
        if node.value == "fairscale":
            self._rename(node, node)  # names of attributes and of keywords see no variables

    def visit_Attribute(self, node: cst.Attribute) -> None:
        for path in filter(_is_fairscale, self._tree.imported_as(node)):
            self._say(node, objection(path))

    def visit_MatchKeywordElement(self, node: cst.MatchKeywordElement) -> bool:
        node.pattern.visit(self)
        return False  # its key is no variable, though libcst gives it a scope

    def visit_Global(self, node: cst.Global) -> None:
        self._rename_declared(node)

    def visit_Nonlocal(self, node: cst.Nonlocal) -> None:
        self._rename_declared(node)

    def _rename_declared(self, node: cst.Global | cst.Nonlocal) -> None:
        for item in node.names:
            if item.name.value == "fairscale":
                self._rename(item.name, node)

    # ------------------------------------------------------------ strings
    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._annotations += 1

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._annotations -= 1

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = _text(node)
        if value is None or "fairscale" not in value:
            return
        if self._annotations and self._tree.home(node) is not None:
            if self._tree.home(node) in self._variables.renamed:
                self._replace(node, re.sub(r"(?<![\w.])fairscale(?=\s*\.)", "shardkit", node.value))
        elif _PATH.fullmatch(value):
            said = objection(value.replace(":", "."))
            if self._strings and "." in value and said is None and value in node.value:
                self._replace(node, node.value.replace("fairscale", "shardkit", 1))
            else:
                self._note(node, f"the string {value!r} names fairscale" + (f"; {said}" if said else ""))
        elif _THROUGH.fullmatch(value):
            self._note(node, f"the string {value!r} names a variable fairscale, which has another name now")

    def visit_FormattedStringText(self, node: cst.FormattedStringText) -> None:
        if re.match(r"fairscale\.", node.value):
            self._note(node, f"the string {node.value!r}... names fairscale")

    # ------------------------------------------------------------ what is collected
    def _replace(self, node: cst.CSTNode, new: str) -> None:
        span = self._tree.span(node)
        self.edits[span.start, span.length] = new

    def _say(self, node: cst.CSTNode, text: str | None) -> None:
        """What there is to say about a name is said once."""
        if text is not None and text not in self._said:
            self._said.add(text)
            self._note(node, text)

    def _note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.add((self._tree.span(node).start, text))


def _binding(node: cst.Import | cst.ImportFrom, name: str) -> list[cst.ImportAlias]:
    """The aliases of an import statement that bind a name."""
    if isinstance(node.names, cst.ImportStar):
        return []
    return [a for a in node.names if (a.evaluated_alias or a.evaluated_name.split(".")[0]) == name]


def _imports_another(node: cst.CSTNode | None) -> bool:
    """Whether a statement imports something else than the package as ``fairscale``."""
    if isinstance(node, cst.Import):
        return any(a.asname is not None for a in _binding(node, "fairscale"))
    return isinstance(node, cst.ImportFrom)


def _imports_shardkit(assignment: BaseAssignment) -> bool:
    node = getattr(assignment, "node", None)
    return isinstance(node, cst.Import) and all(a.asname is None for a in _binding(node, "shardkit"))


def _xla(path: str, names: Mapping[str, str] = XLA) -> str | None:
    """Where shardkit has one of torch_xla's modules, or what is below it."""
    for theirs, ours in names.items():
        if path == theirs or path.startswith(f"{theirs}."):
            return ours + path.removeprefix(theirs)
    return None
