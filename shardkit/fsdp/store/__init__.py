"""Where the values of a flat parameter are: the mode is a class chosen once, what memory means is a state."""

from __future__ import annotations

from ..originals import FlatParamLike
from .base import Gather, Store, is_whole
from .deferred import Deferred
from .lazy import Lazy, gather_together
from .states import FULL, GATHERED, GATHERING, KEPT, LOCKED, RELEASED, SUMMONED, TRANSITIONS, State
from .stored import Stored
from .whole import Whole

__all__ = [
    "FULL",
    "GATHERED",
    "GATHERING",
    "KEPT",
    "LOCKED",
    "RELEASED",
    "SUMMONED",
    "TRANSITIONS",
    "Deferred",
    "Gather",
    "Lazy",
    "State",
    "Store",
    "Stored",
    "Whole",
    "gather_together",
    "store_for",
]


def store_for(flat: FlatParamLike, before: Store | None) -> Store:
    """The store for where the shard is now; ``before``, the last one, if it can serve on."""
    kind = _kind_for(flat)
    return before if type(before) is kind and before.fits() else kind(flat)


def _kind_for(flat: FlatParamLike) -> type[Store]:
    backend = flat.group.backend
    if flat.param.is_meta and backend.device_type != "meta":  # a backend that counts serves meta tensors
        return Deferred
    if is_whole(flat):
        return Whole
    return Stored if backend.has_storage else Lazy
