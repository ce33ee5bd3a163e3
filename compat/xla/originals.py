"""Names that a module here has not: it is torch_xla's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which takes names from this module of torch_xla's once they are asked for."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return get
