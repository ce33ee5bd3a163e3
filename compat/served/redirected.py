"""Names of fairscale that serve no purpose on today's torch: importable, and on use they say what to take.

Code that only imports such a name, subclasses it or asks ``isinstance`` keeps working; building one, calling one or
reading an attribute of its class raises :class:`shardkit.errors.RedirectedError`.

The names stand in the table of :mod:`.redirections`. Names that a module of fairscale's has from elsewhere, and that
work, stand in :mod:`.reexports`, with the modules that have moved. :func:`serve` puts a finder before all others, which
gives a module of ``compat/`` its entries when it is imported. A module that has nothing else has no file.

Each name is listed with its reason in tests/parity/differences.py as well (kind "redirected"), from which
docs/PARITY.md is made.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NoReturn

from shardkit.errors import RedirectedError

from . import PARTS
from .redirections import REDIRECTED, REDIRECTED_MODULES
from .reexports import MOVED, REEXPORTED, origins

if TYPE_CHECKING:
    from shardkit.types import Tree

MARK = "__redirected__"
_ROOT = "shardkit"


class _RedirectedMeta(type):
    """Methods and constants looked up on the class itself are a use of it, too."""

    def __getattr__(cls, attribute: str) -> Tree:
        # What Python and its tools ask every class for (pickle, doctest, inspect) is no use of it.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise RedirectedError(f"{getattr(cls, MARK)} (read: {attribute})")


def _told(name: str, instead: str, why: str) -> tuple[str, str, str]:
    """Returns the path of the module under shardkit, the name within it, and what is said on use."""
    module, _, short = f"{_ROOT}.{name}".rpartition(".")
    return module, short, f"fairscale.{name} is not carried over: {why}. Use {instead} instead."


def redirected(name: str, instead: str, *, why: str) -> type:
    """Returns a class that stands at fairscale's path and raises when it (or a subclass) is instantiated.

    Args:
        name: its path below ``fairscale``, e.g. ``"nn.pipe.async_pipe.AsyncPipe"``.
        instead: what to take, as users would write it, e.g. ``"torch.distributed.pipelining.PipelineStage"``.
        why: the reason in half a sentence, without a full stop.
    """
    module, short, message = _told(name, instead, why)

    def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
        raise RedirectedError(message)

    namespace = {
        "__new__": refuse,
        "__module__": module,
        "__qualname__": short,
        "__doc__": message,
        MARK: message,
    }
    return _RedirectedMeta(short, (), namespace)


def redirected_function(name: str, instead: str, *, why: str) -> Callable[..., NoReturn]:
    """Returns a function that stands at fairscale's path and raises when called; arguments as of :func:`redirected`."""
    module, short, message = _told(name, instead, why)

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RedirectedError(message)

    refuse.__name__, refuse.__qualname__, refuse.__module__, refuse.__doc__ = short, short, module, message
    setattr(refuse, MARK, message)
    return refuse


def redirected_names(module: str) -> Callable[[str], Tree]:
    """Returns the ``__getattr__`` of a module: its names in the table, made when they are asked for."""
    path = module.removeprefix(f"{_ROOT}.")
    names = _names_of(path)

    @functools.cache  # a class is one object
    def get(name: str) -> Tree:
        if name == "__all__":  # "import *" asks for it
            return sorted({n for n in names if not n.startswith("_")} | _defined_in(sys.modules[module]))
        if name not in names:
            # fairscale's packages import what is in them
            is_package = not name.startswith("_") and "__path__" in vars(sys.modules.get(module, sys))
            if is_package and importlib.util.find_spec(f"{module}.{name}") is not None:
                return importlib.import_module(f"{module}.{name}")
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return names[name]()

    return get


def _defined_in(module: ModuleType) -> set[str]:
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", module.__name__) == module.__name__}
    return {n for n in own if not n.startswith("_") and not isinstance(getattr(module, n), ModuleType)}


def _names_of(path: str) -> dict[str, Callable[[], Tree]]:
    """Returns what the table has for a module: each name, and what makes it."""
    found: dict[str, Callable[[], Tree]] = {}
    for entry in REDIRECTED:
        for name in entry.of(path):
            make = redirected_function if name.endswith("()") else redirected
            short = name.removesuffix("()")
            found[short] = functools.partial(make, f"{path}.{short}", entry.instead, why=entry.why)
    for name, (home, there) in origins(path).items():
        found[name] = functools.partial(_imported, home, there)
    return found


def _imported(path: str, name: str) -> Tree:
    home = importlib.import_module(f"{_ROOT}.{path}")
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{home.__name__}.{name}")


def is_redirected(thing: object) -> bool:
    """Says whether a class or function was made here (subclasses of users don't count)."""
    return isinstance(thing, type | FunctionType) and MARK in vars(thing)


# ---------------------------------------------------------------- modules that have no file
_SERVED = {f"{_ROOT}.{path}" for path in (*REDIRECTED_MODULES, *REEXPORTED, *MOVED)}
_SERVED |= {name.rpartition(".")[0] for name in _SERVED}  # the packages they are in


def _new_name(fullname: str) -> str:
    """Tells where a module that has moved is now; "" for all others."""
    root, *parts = fullname.split(".")
    for length in range(len(parts), 0, -1):  # what is further in may have moved elsewhere
        if root == _ROOT and (there := MOVED.get(".".join(parts[:length]))):
            return ".".join([_ROOT, there, *parts[length:]])
    return ""


class _TableFinder(MetaPathFinder):
    """Finds the modules of the table.

    It is asked first: a folder in which nothing but a cache is left would be found as a namespace package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if there := _new_name(fullname):
            if importlib.util.find_spec(there) is None:
                return None
            return ModuleSpec(fullname, _TableLoader(), origin=there, is_package=True)
        if fullname not in _SERVED:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.has_location:
            if isinstance(found.loader, SourceFileLoader) and fullname.split(".")[1] in PARTS:
                found.loader = _FileLoader(found.loader.name, found.loader.path)
            return found
        is_package = any(name.startswith(f"{fullname}.") for name in _SERVED)
        return ModuleSpec(
            fullname,
            _TableLoader(),
            origin=f"the table of {_ROOT}.compat.redirections",
            is_package=is_package,
        )


class _FileLoader(SourceFileLoader):
    """Gives a module that has a file its entries, too."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = redirected_names(module.__name__)
        super().exec_module(module)


class _TableLoader(Loader):
    """Fills a module from the table; gives one that has moved under the name that it had earlier: the same object."""

    def exec_module(self, module: ModuleType) -> None:
        if there := _new_name(module.__name__):
            sys.modules[module.__name__] = importlib.import_module(there)
            return
        path = module.__name__.removeprefix(f"{_ROOT}.")
        names = sorted(_names_of(path))
        module.__doc__ = f"{path}: names from elsewhere, and names that say on use what to take instead."
        module.__dict__.update(__getattr__=redirected_names(module.__name__), __dir__=lambda: names)


_FINDER = _TableFinder()


def serve() -> None:
    """Makes the modules of the table importable from here on. A second call changes nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
