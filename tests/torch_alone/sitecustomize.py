"""On PYTHONPATH: Python finds torch, what torch needs, pytest and hypothesis, and nothing else that is installed.

``make plain`` runs tests so, and all processes that they start. torch asks for numpy by importing it, so that it finds
none either, as after ``pip install torch`` alone. An environment of its own would take a minute and a gigabyte more.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_WANTED = ("torch", "pytest", "pytest-timeout", "hypothesis", "pip", "shardkit")
_HIDDEN = "SHARDKIT_TESTS_HIDDEN"  # names of packages, for processes that this one starts


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _kept() -> set[str]:
    """Distributions that are wanted, and what they need."""
    found: set[str] = set()
    todo = list(_WANTED)
    while todo:
        name = _normal(todo.pop())
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system, or another Python
            continue
        if name not in found:
            found.add(name)
            todo += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]  # type: ignore[index]
    return found


if _HIDDEN not in os.environ:
    kept = _kept()
    names = importlib.metadata.packages_distributions().items()
    os.environ[_HIDDEN] = " ".join(n for n, of in names if not kept & set(map(_normal, of)))
_hidden = frozenset(os.environ[_HIDDEN].split())


class TorchAlone(PathFinder):
    """Finds what is not hidden."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in _hidden else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *args: Any, **kwargs: Any) -> Iterable[Any]:
        found = super().find_distributions(*args, **kwargs)
        return (d for d in found if not any(n in _hidden for n in _top_level(d)))


def _top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    return {
        file.parts[0]
        for file in distribution.files or ()
        if file.name == "__init__.py" and len(file.parts) == 2
    }


sys.meta_path[:] = [TorchAlone if finder is PathFinder else finder for finder in sys.meta_path]
