"""State dicts of wrapped and plain modules, both ways: ``module.weight`` and ``weight``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from ..torch_seams.module_versions import versions_of
from ..types import IncompatibleKeys, SavedState, StateDict, Tree

PREFIX = "module."


def without_prefix(state: SavedState, prefix: str = PREFIX) -> StateDict:
    """The state dict of the module inside: every key without the prefix; unchanged if some key hasn't got it.

    Only the beginning of a key counts: ``head.module.weight`` keeps its name.
    """
    if not all(key.startswith(prefix) for key in state):
        return _renamed(state, lambda key: key)
    return _renamed(state, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else "")


def with_prefix(state: SavedState, prefix: str = PREFIX) -> StateDict:
    """The state dict of a wrapper: every key with the prefix; unchanged if all keys have it."""
    if state and all(key.startswith(prefix) for key in state):
        return _renamed(state, lambda key: key)
    return _renamed(state, lambda key: prefix + key)


def load_with_or_without_prefix(
    module: nn.Module, state: SavedState, strict: bool = True, prefix: str = PREFIX
) -> IncompatibleKeys:
    """``module.load_state_dict``, whether the state dict is of a wrapped module or not.

    Of the forms of the state dict (as it is, with the prefix, without it) the one is loaded that has most keys in
    common with the module; where none fits, ``load_state_dict`` says what is missing.
    """
    wanted = set(module.state_dict())
    forms = [dict(state), without_prefix(state, prefix), with_prefix(state, prefix)]
    best = max(forms, key=lambda form: len(wanted & set(form)))
    return module.load_state_dict(state if best is forms[0] else best, strict=strict)


def _renamed(state: SavedState, rename: Callable[[str], str]) -> StateDict:
    renamed: Tree = OrderedDict((rename(key), value) for key, value in state.items())
    metadata = versions_of(state)
    if metadata is not None:  # of modules, whose paths have no dot at the end; the root's is ""
        renamed._metadata = OrderedDict(
            (rename(key + ".").removesuffix("."), value) for key, value in metadata.items()
        )
    return renamed
