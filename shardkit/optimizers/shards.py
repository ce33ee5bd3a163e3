"""Which parameters are shards: parts of flat parameters, of which each rank lists its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigurationError

# Held weakly: flat parameters hold their shards, and else neither would ever be freed.
_behind: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_shard(param: torch.Tensor, flat: object) -> None:
    """From now on this parameter is known to be a shard of that flat parameter."""
    _behind[param] = weakref.ref(flat)


def shard_behind(param: torch.Tensor) -> Any:
    """The flat parameter whose shard a parameter is, None for other parameters."""
    found = _behind.get(param)
    return None if found is None else found()


def refuse_shards(params: Iterable[torch.Tensor], what: str, instead: str) -> None:
    """Raises ConfigurationError if any of these is a shard.

    Args:
        what: what was to be made of them.
        instead: what to do.
    """
    if any(shard_behind(p) is not None for p in params):
        raise ConfigurationError(
            f"{what} was given parameters of an FSDP module. These are shards, other ones on each rank, and {what} "
            f"takes them for the same on all ranks. {instead}"
        )
