"""torch.distributed's record of a process's groups, ``_world``, where a process has several ranks: each its own."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardkit.types import StateDict, Tree


def worlds_of_ranks(here: Callable[[], StateDict | None]) -> Tree:
    """Makes what takes the place of ``_world``: a rank begins without groups, as a process does.

    Args:
        here: returns what the calling rank has of it, which is filled; None for a caller that is no rank and has the
            process's own.
    """
    outside = dist.distributed_c10d._world

    def private(name: str) -> property:
        def get(_: object) -> Tree:
            values = here()
            if values is None:
                return getattr(outside, name)
            if name not in values:
                now = getattr(outside, name)
                values[name] = type(now)() if isinstance(now, int | dict | list) else None
            return values[name]

        def set_(_: object, value: object) -> None:
            values = here()
            if values is None:
                setattr(outside, name, value)
            else:
                values[name] = value

        return property(get, set_)

    kept = [name for name, value in vars(type(outside)).items() if isinstance(value, property)]
    # pg_config_info is computed from the others
    own = {name: private(name) for name in kept if name != "pg_config_info"}
    return type("WorldsOfRanks", (type(outside),), own)()
