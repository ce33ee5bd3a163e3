"""``import fairscale`` gives shardkit, for programs that are not to be changed.

:func:`install` puts a finder in front of all others. A module ``fairscale.a.b`` then is the module ``shardkit.a.b``,
the same object under a second name, so that classes are identical, patches hold on both sides, and pickles that
name fairscale's classes find shardkit's. Only the root is a module of its own: it says fairscale's version.

The folder ``compat/`` is no package, since its parts would be modules twice (``shardkit.nn``, ``shardkit.compat.nn``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from shardkit.errors import LifecycleError

FAIRSCALE_VERSION = (0, 4, 13)
# What stands under fairscale's root; "utils" is where most of "internal" and "fair_dev" was up to 0.4.6.
PARTS = frozenset({"experimental", "fair_dev", "internal", "nn", "optim", "utils"})

_VERSION = ".".join(map(str, FAIRSCALE_VERSION))
_METADATA = f"Metadata-Version: 2.1\nName: fairscale\nVersion: {_VERSION}\nSummary: served by shardkit\n"


def install() -> None:
    """Makes ``import fairscale``, with all that is below it, give shardkit from here on.

    Holds for pickles and checkpoints, ``importlib``, ``importlib.metadata.version("fairscale")``, and for processes
    that multiprocessing (``torch.multiprocessing.spawn``, :func:`shardkit.launch`) starts. Programs started anew, such
    as torchrun's ranks, install it themselves: ``torchrun -m shardkit run-as-fairscale script.py``.

    A second call changes nothing. fairscale itself may be installed; it is not used.

    Raises:
        LifecycleError: fairscale itself has been imported already.
    """
    there = sys.modules.get("fairscale")
    if there is not None and not isinstance(there.__loader__, _Loader):
        raise LifecycleError(
            f"fairscale itself has been imported already, from {getattr(there, '__file__', None)}, and what took "
            "names from it keeps them; call shardkit.compat.install() before the first import of fairscale"
        )
    if not is_installed():
        sys.meta_path.insert(0, _FINDER)
        install_in_children(__name__)


def uninstall() -> None:
    """Ends what :func:`install` began. What has been imported meanwhile keeps working."""
    if is_installed():
        sys.meta_path.remove(_FINDER)
        install_in_children(__name__, False)
        for name in [n for n in sys.modules if n.partition(".")[0] == "fairscale"]:
            del sys.modules[name]


def is_installed() -> bool:
    return _FINDER in sys.meta_path


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Keeps :func:`install` up for a while. Left in place where it was before."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


# ---------------------------------------------------------------- modules
class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = fullname.partition(".")
        if root != "fairscale":
            return None
        if below in ("", "version"):
            return ModuleSpec(fullname, _Loader(), origin=__file__, is_package=not below)
        ours = f"shardkit.{below}"
        found = importlib.util.find_spec(ours) if below.partition(".")[0] in PARTS else None
        if found is None:
            # Not left to other finders: that of an editable installation would find fairscale's own.
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: shardkit, which stands in for fairscale, has no {ours}",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(), origin=found.origin, is_package=is_package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context.name in (None, "fairscale") else []


class _Loader(Loader):
    """Makes ``fairscale`` and ``fairscale.version``; for all else, puts shardkit's module in place."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in ("fairscale", "fairscale.version"):
            module.__dict__["__version_tuple__"] = FAIRSCALE_VERSION
        if name == "fairscale":
            module.__dict__.update(__file__=__file__, __version__=_VERSION, __all__=[], __getattr__=_part)
            importlib.import_module("fairscale.nn")
        elif name != "fairscale.version":
            # Python's importing takes what stands in sys.modules afterwards, and leaves its attributes alone.
            sys.modules[name] = importlib.import_module(f"shardkit{name.removeprefix('fairscale')}")
            _name_all_twice()


def _name_all_twice() -> None:
    """Gives what shardkit has loaded its second name at once, and is never imported under it.

    Importing a module sets an attribute of its package. Where a function has taken the name of its module
    (``nn.auto_wrap``), this would undo it.
    """
    for name, module in list(sys.modules.items()):
        root, _, below = name.partition(".")
        if root == "shardkit" and below.partition(".")[0] in PARTS:
            sys.modules.setdefault(f"fairscale.{below}", module)


def _part(name: str) -> ModuleType:
    if name in PARTS or name == "version":
        return importlib.import_module(f"fairscale.{name}")
    raise AttributeError(f"module 'fairscale' has no attribute {name!r}")


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"METADATA": _METADATA, "top_level.txt": "fairscale\n"}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


_FINDER = _Finder()


# ---------------------------------------------------------------- child processes
class _InChild:
    """Unpickling it installs. A spawned process does so before it imports the program it was spawned by."""

    def __init__(self, path: list[str], doors: list[str]) -> None:
        self._path = path  # set too late by multiprocessing itself
        self._doors = doors

    def __reduce__(self) -> tuple[object, ...]:
        calls = "".join(f"; import {door}; {door}.install()" for door in self._doors)
        return exec, (f"import sys; sys.path[:] = {self._path!r}{calls}",)


_doors: dict[str, None] = {}


def install_in_children(door: str, wanted: bool = True) -> None:
    """Lets processes that multiprocessing spawns call ``install()`` of a module too, or not any more."""
    if wanted:
        _doors[door] = None
    else:
        _doors.pop(door, None)
    multiprocessing.spawn.get_preparation_data = _preparation_data if _doors else _original_preparation_data


_original_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, object]:
    """Returns what multiprocessing tells a process that it spawns, and an entry of ours, which it ignores."""
    data = _original_preparation_data(name)
    return {**data, "shardkit.compat": _InChild(data["sys_path"], list(_doors))}
