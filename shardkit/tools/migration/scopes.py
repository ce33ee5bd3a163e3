"""The names of a module: which scope binds each of them, how, and where they are seen.

Only what is asked for is looked into, so that a long file costs little more than Python's own parser takes for it.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Callable, Container, Iterator, Sequence
from types import UnionType
from typing import Any, NamedTuple, TypeAlias

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_Pattern: TypeAlias = ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping
# Fields of nodes that hold no nodes, or none that says anything.
_NO_NODES = frozenset(
    {"attr", "conversion", "ctx", "is_async", "kind", "kwd_attrs", "op", "ops", "simple", "type_comment"}
)


class By(enum.Enum):
    IMPORT = "import name.below"
    RENAMING_IMPORT = "import other as name, from other import name"
    DEFINITION = "def name, class name, an argument"
    VARIABLE = "all else"


@dataclasses.dataclass(frozen=True)
class Binding:
    """One place that binds a name. ``path``: what an import binds it to, "" for all else and below ``.``."""

    by: By
    path: str = ""


@dataclasses.dataclass(eq=False)
class Scope:
    """A module, class, function or comprehension, and what it binds."""

    kind: type[ast.AST]
    parent: Scope | None = None
    bound: dict[str, list[Binding]] = dataclasses.field(default_factory=dict)
    declared: dict[str, type[ast.Global | ast.Nonlocal]] = dataclasses.field(default_factory=dict)

    @property
    def is_class(self) -> bool:
        return self.kind is ast.ClassDef

    @property
    def is_comprehension(self) -> bool:
        return issubclass(self.kind, _Comprehension)

    @property
    def is_module(self) -> bool:
        return self.parent is None

    def outwards(self) -> Iterator[Scope]:
        """Itself, and those around it whose names it sees."""
        yield self
        scope = self.parent
        while scope is not None:
            if not scope.is_class:
                yield scope
            scope = scope.parent

    def home(self, name: str) -> Scope | None:
        """The scope whose variable a name is in this one; None of what the module doesn't bind."""
        is_global = False
        for scope in self.outwards():
            declared = scope.declared.get(name)
            is_global |= declared is ast.Global
            if name in scope.bound and declared is None and (scope.is_module or not is_global):
                return scope
        return None

    def bind(self, name: str, binding: Binding) -> None:
        """Notes what binds a name, wherever it is declared."""
        self.bound.setdefault(name, []).append(binding)

    def hand_over(self) -> None:
        """Gives bindings of names that are declared to be another scope's to that one."""
        for name, how in self.declared.items():
            others = [s for s in self.outwards() if s is not self and name not in s.declared]
            others = others[-1:] if how is ast.Global else [s for s in others if name in s.bound]
            for binding in self.bound.get(name, ()) if others else ():
                others[0].bind(name, binding)


class Seen(NamedTuple):
    """A node that names something; ``in_annotation``: it is part of a type."""

    node: ast.AST
    scope: Scope
    in_annotation: bool


def imports(
    tree: ast.Module, is_looked_at: Callable[[ast.stmt], bool]
) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements, in no order, but for those in statements that are not looked at."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.stmt) or is_looked_at(node):
            for name in _BLOCKS:
                todo += getattr(node, name, ())


def bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
    """The names that an import binds, and how."""
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            path = "" if statement.level else f"{statement.module}.{alias.name}"
            yield alias.asname or alias.name, Binding(By.RENAMING_IMPORT, path)
        elif alias.asname is not None:
            yield alias.asname, Binding(By.RENAMING_IMPORT, alias.name)
        else:
            name = alias.name.partition(".")[0]
            yield name, Binding(By.IMPORT, name)


def look(
    tree: ast.Module,
    is_looked_at: Callable[[ast.stmt], bool],
    package: str,
    names: Container[str],
    plain: Callable[[str], str],
) -> tuple[list[Seen], list[Scope]]:
    """Collects what a module says about some names, in no order, and its scopes with what binds those names in them.

    Of a chain ``a.b.c`` come the whole and ``a``; the text of f-strings comes with them.

    Args:
        is_looked_at: statements of which it is False are skipped, with all in them.
        package: names and strings with this in them are asked for.
        names: further ones that are, all of it.
        plain: the name that a name of the tree stands for.
    """
    looking = _Looking(is_looked_at, package, names, plain)
    looking.run(tree)
    for scope in looking.scopes:
        scope.hand_over()
    return looking.seen, looking.scopes


class _Looking:
    """A walk over a tree, without recursion: files may nest as deep as Python's parser follows."""

    def __init__(
        self,
        is_looked_at: Callable[[ast.stmt], bool],
        package: str,
        names: Container[str],
        plain: Callable[[str], str],
    ) -> None:
        self._is_looked_at, self._package, self._names, self._plain = is_looked_at, package, names, plain
        self._todo: list[tuple[_Nodes, Scope, bool]] = []
        self.seen: list[Seen] = []
        self.scopes: list[Scope] = []

    def run(self, tree: ast.Module) -> None:
        """Looks at all of a module."""
        self._todo.append((tree.body, self._scope(ast.Module, None), False))
        while self._todo:
            nodes, scope, in_annotation = self._todo.pop()
            here = list(nodes)
            while here:
                node = here.pop()
                visit, fields = _ways[type(node)]
                if isinstance(node, ast.stmt) and not self._is_looked_at(node):
                    continue
                if visit is not None:
                    here += visit(self, node, scope, in_annotation)
                    continue
                for name in fields:
                    child = getattr(node, name)
                    if type(child) is list:
                        here += child
                    else:
                        here.append(child)

    def _is_asked(self, name: str) -> bool:
        return self._package in name or self._plain(name) in self._names

    def _scope(self, kind: type[ast.AST], parent: Scope | None) -> Scope:
        self.scopes.append(Scope(kind, parent))
        return self.scopes[-1]

    # Each of these looks at a node, and returns what is to be looked at in the same scope.
    def _name(self, node: ast.Name, scope: Scope, in_annotation: bool) -> _Nodes:
        if self._is_asked(node.id):
            self.seen.append(Seen(node, scope, in_annotation))
            if not isinstance(node.ctx, ast.Load):
                scope.bind(self._plain(node.id), Binding(By.VARIABLE))
        return ()

    def _constant(self, node: ast.Constant, scope: Scope, in_annotation: bool) -> _Nodes:
        if isinstance(node.value, str) and self._package in node.value:
            self.seen.append(Seen(node, scope, in_annotation))
        return ()

    def _attribute(self, node: ast.Attribute, scope: Scope, in_annotation: bool) -> _Nodes:
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            return (root,)
        if self._is_asked(root.id):
            self.seen.append(Seen(node, scope, in_annotation))
            return (root,)
        return ()

    def _text(self, node: ast.JoinedStr, scope: Scope, in_annotation: bool) -> _Nodes:
        self.seen.append(Seen(node, scope, in_annotation))
        return [value for value in node.values if not isinstance(value, ast.Constant)]

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope, in_annotation: bool) -> _Nodes:
        self.seen.append(Seen(node, scope, in_annotation))
        for name, binding in bindings(node):
            if self._is_asked(name):
                path = self._plain(binding.path)
                scope.bind(self._plain(name), dataclasses.replace(binding, path=path))
        return ()

    def _declaration(self, node: ast.Global | ast.Nonlocal, scope: Scope, in_annotation: bool) -> _Nodes:
        self.seen.append(Seen(node, scope, in_annotation))
        if not scope.is_module:  # where it says nothing new
            scope.declared.update((self._plain(n), type(node)) for n in node.names if self._is_asked(n))
        return ()

    def _function(self, node: _Function, scope: Scope, in_annotation: bool) -> _Nodes:
        inner, given = self._scope(type(node), scope), node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        arguments += [a for a in (given.vararg, given.kwarg) if a is not None]
        for argument in arguments:
            if self._is_asked(argument.arg):
                inner.bind(self._plain(argument.arg), Binding(By.DEFINITION))
        outside = [*arguments, *given.defaults, *given.kw_defaults]
        if isinstance(node, ast.Lambda):
            self._todo.append(([node.body], inner, False))
        else:
            self._define(node.name, scope)
            self._todo += [(node.body, inner, False), ([node.returns], scope, True)]
            outside += [*node.decorator_list, *_type_parameters(node)]
        return outside

    def _class(self, node: ast.ClassDef, scope: Scope, in_annotation: bool) -> _Nodes:
        self._define(node.name, scope)
        self._todo.append((node.body, self._scope(ast.ClassDef, scope), False))
        return [*node.bases, *node.keywords, *node.decorator_list, *_type_parameters(node)]

    def _define(self, name: str, scope: Scope) -> None:
        if self._is_asked(name):
            scope.bind(self._plain(name), Binding(By.DEFINITION))

    def _type_parameter(self, node: ast.AST, scope: Scope, in_annotation: bool) -> _Nodes:
        fields = dict(ast.iter_fields(node))
        self._define(fields["name"], scope)
        return [fields.get(name) for name in ("bound", "default_value")]

    def _comprehension(self, node: _Comprehension, scope: Scope, in_annotation: bool) -> _Nodes:
        inner, first = self._scope(type(node), scope), node.generators[0]
        inside: list[ast.AST] = [first.target, *first.ifs, *node.generators[1:]]
        inside += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._todo.append((inside, inner, in_annotation))
        return (first.iter,)  # which alone is evaluated outside

    def _walrus(self, node: ast.NamedExpr, scope: Scope, in_annotation: bool) -> _Nodes:
        outside = next(s for s in scope.outwards() if not s.is_comprehension)
        self._todo.append(([node.target], outside, False))
        return (node.value,)

    def _assignment(self, node: ast.Assign | ast.AugAssign, scope: Scope, in_annotation: bool) -> _Nodes:
        self.seen.append(Seen(node, scope, in_annotation))
        return [*(node.targets if isinstance(node, ast.Assign) else [node.target]), node.value]

    def _annotated(self, node: ast.AnnAssign | ast.arg, scope: Scope, in_annotation: bool) -> _Nodes:
        self._todo.append(([node.annotation], scope, True))
        if isinstance(node, ast.arg):
            return ()
        self.seen.append(Seen(node, scope, in_annotation))
        return (node.target, node.value)

    def _pattern(self, node: _Pattern, scope: Scope, in_annotation: bool) -> _Nodes:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None and self._is_asked(name):
            self.seen.append(Seen(node, scope, in_annotation))
            scope.bind(self._plain(name), Binding(By.VARIABLE))
        if isinstance(node, ast.ExceptHandler):
            return [node.type, *node.body]
        if isinstance(node, ast.MatchMapping):
            return [*node.keys, *node.patterns]
        return [node.pattern] if isinstance(node, ast.MatchAs) else []


def _type_parameters(node: ast.AST) -> Sequence[Any]:
    """Those of a function or class, which newer Pythons have."""
    return dict(ast.iter_fields(node)).get("type_params", ())


_Nodes: TypeAlias = Sequence[ast.AST | None]
_VISITS: dict[type[ast.AST] | UnionType, Callable[..., _Nodes]] = {
    ast.Name: _Looking._name,
    ast.Constant: _Looking._constant,
    ast.Attribute: _Looking._attribute,
    ast.JoinedStr: _Looking._text,
    ast.Import | ast.ImportFrom: _Looking._import,
    ast.Global | ast.Nonlocal: _Looking._declaration,
    _Function: _Looking._function,
    ast.ClassDef: _Looking._class,
    _Comprehension: _Looking._comprehension,
    ast.NamedExpr: _Looking._walrus,
    ast.Assign | ast.AugAssign: _Looking._assignment,
    ast.AnnAssign | ast.arg: _Looking._annotated,
    _Pattern: _Looking._pattern,
}
for _name, _visit in (("type_param", _Looking._type_parameter), ("TemplateStr", _Looking._text)):
    if hasattr(ast, _name):  # of newer Pythons
        _VISITS[getattr(ast, _name)] = _visit


class _Ways(dict[type, tuple[Callable[..., _Nodes] | None, list[str]]]):
    """How nodes of a type are looked at, and which fields may hold nodes."""

    def __missing__(self, kind: type) -> tuple[Callable[..., _Nodes] | None, list[str]]:
        visit = next((visit for of, visit in _VISITS.items() if issubclass(kind, of)), None)
        fields = kind._fields if issubclass(kind, ast.AST) else ()
        self[kind] = visit, [f for f in fields if f not in _NO_NODES]
        return self[kind]


_ways = _Ways()
