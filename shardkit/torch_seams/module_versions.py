"""Versions of modules, which torch notes in an attribute of state dicts."""

from __future__ import annotations

from ..types import SavedState, StateDict


def versions_of(state_dict: SavedState) -> StateDict | None:
    """Returns what torch noted, by path; None in dicts that were copied without the attribute."""
    try:
        return state_dict._metadata  # type: ignore[attr-defined]
    except AttributeError:
        return None
