"""Which of fairscale's names shardkit has, and what to say about the others."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from shardkit.compat import PARTS
from shardkit.compat.redirected import MARK, is_redirected

_VERSION = "shardkit has versions of its own, and fairscale's interface in all of them: drop this check"


def no_module(path: str, *, star: bool = False) -> str | None:
    """What is to be said about ``import path`` or, with ``star``, ``from path import *``; None if it just works."""
    if path == "fairscale" and star:
        return "all of shardkit's own names come in, where fairscale gives none: drop this import"
    if path == "fairscale.version":
        return _VERSION
    return f"shardkit has no {_ours(path)}" if _module(path) is None else None


@functools.cache
def objection(path: str, name: str = "") -> str | None:
    """What is to be said about ``from path import name``, or about using ``path``; None if it just works.

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
        said = _object(here, at, part)
        if said is not None:
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
