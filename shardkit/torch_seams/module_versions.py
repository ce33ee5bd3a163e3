"""Versions of modules, which torch notes in an attribute of state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def versions_of(state_dict: Mapping[str, Any]) -> Any:
    """What torch noted, by path; None in dicts that were copied without the attribute."""
    return getattr(state_dict, "_metadata", None)
