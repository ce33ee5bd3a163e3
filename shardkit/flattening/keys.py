"""Keys of state dicts: with and without the wrapper, and with flat parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from ..torch_seams.module_versions import versions_of
from ..types import SavedState, StateDict
from .flat_parameter import FLAT_PREFIX

WRAPPED = "_fpw_module"
OLD_FLAT_NAME = "flat_param"  # when there was always exactly one

_translate_loaded: ContextVar[bool] = ContextVar("shardkit.flattening.keys.translate_loaded", default=True)


def rename_prefix(state_dict: MutableMapping[str, Any], old: str, new: str) -> None:
    """Makes keys that begin with ``old`` begin with ``new``, in place; they go to the end."""
    for key in [k for k in state_dict if k.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)


def has_flat_keys(state_dict: SavedState, prefix: str) -> bool:
    """Says whether the dict has flat parameters for the wrapper at ``prefix``; not for those within it."""
    start = prefix + OLD_FLAT_NAME
    return any(
        key == start or (key.startswith(prefix + FLAT_PREFIX) and "." not in key[len(prefix) :])
        for key in state_dict
    )


def translates_loaded() -> bool:
    """Says whether keys that are loaded get the names that wrapping made."""
    return _translate_loaded.get()


@contextlib.contextmanager
def no_key_translation() -> Iterator[None]:
    """Lets ``load_state_dict`` take keys as they are, with names of wrappers' attributes, within this block."""
    token = _translate_loaded.set(False)
    try:
        yield
    finally:
        _translate_loaded.reset(token)


def rename_saved(state_dict: StateDict, prefix: str) -> None:
    """Names the wrapped module's entries as if there were no wrapper at ``prefix``."""
    rename_prefix(state_dict, f"{prefix}{WRAPPED}.", prefix)
    versions: StateDict = versions_of(state_dict) or {}
    inner = prefix + WRAPPED
    for key in [k for k in versions if k == inner or k.startswith(inner + ".")]:
        # Both names stay: the plain module looks for one, the wrapped module for the other.
        versions.setdefault((prefix + key[len(inner) :].removeprefix(".")).removesuffix("."), versions[key])


def rename_loaded(state_dict: StateDict, prefix: str, flat_names: Sequence[str]) -> None:
    """Reverses :func:`rename_saved`; the flat parameters of the wrapper at ``prefix`` stay where they are."""
    if not translates_loaded():
        return
    if prefix + OLD_FLAT_NAME in state_dict and flat_names:
        state_dict[prefix + flat_names[0]] = state_dict.pop(prefix + OLD_FLAT_NAME)
    down = f"{prefix}{WRAPPED}."
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(down)]:
        if key[len(prefix) :] not in flat_names:
            state_dict[down + key[len(prefix) :]] = state_dict.pop(key)
