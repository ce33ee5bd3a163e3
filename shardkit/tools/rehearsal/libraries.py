"""State that libraries keep once a process, and that each rank of a rehearsal needs for itself."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

from shardkit.types import Framework, StateDict, Tree

_MODULE = "accelerate.state"
_CLASSES = ("PartialState", "AcceleratorState", "GradientState")  # all objects of one share ``_shared_state``


class _OwnState(threading.local):
    """A class attribute that is another dict in each thread."""

    def __init__(self) -> None:
        self.values: StateDict = {}

    def __get__(self, instance: object, owner: type | None = None) -> StateDict:
        return self.values

    def __set__(self, instance: object, values: StateDict) -> None:
        self.values = values


class _Watcher(importlib.abc.MetaPathFinder):
    """Hears of the import of accelerate."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo, self._is_looking = undo, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        loader: Tree = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _separate(module, self._undo)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Inside, ranks have such state of their own, in libraries that are imported, or will be."""
    with contextlib.ExitStack() as undo:
        if hasattr(functools.cached_property(lambda _: None), "lock"):
            undo.enter_context(mock.patch.object(functools.cached_property, "__get__", _without_lock))
        if _MODULE in sys.modules:
            _separate(sys.modules[_MODULE], undo)
        else:
            watcher = _Watcher(undo)
            sys.meta_path.insert(0, watcher)
            undo.callback(sys.meta_path.remove, watcher)
        yield


def _without_lock(attribute: Framework, instance: object, owner: type | None = None) -> Tree:
    """``cached_property`` of Python 3.12: before, all objects of a class compute theirs under one lock.

    Where that communicates, as transformers' arguments do, a second rank would wait for the lock, and the first one for
    the second.
    """
    if instance is None:
        return attribute
    values = vars(instance)
    if attribute.attrname not in values:
        values[attribute.attrname] = attribute.func(instance)
    return values[attribute.attrname]


def _separate(module: Framework, undo: contextlib.ExitStack) -> None:
    for name in _CLASSES:
        owner = getattr(module, name, None)
        if owner is not None and "_shared_state" in vars(owner):
            undo.callback(setattr, owner, "_shared_state", vars(owner)["_shared_state"])
            owner._shared_state = _OwnState()
