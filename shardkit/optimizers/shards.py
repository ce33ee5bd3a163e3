"""Which parameters are shards: parts of flat parameters, of which each rank lists its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigurationError
from ..torch_seams.dtensors import is_dtensor
from ..types import Tree

# What a registered parameter is listed for, by its id; both are held weakly by nobody else. Not by weak references to
# parameters: torch swaps the contents of DTensors when they move, and refuses that where there are any.
_listings: dict[int, weakref.ref[Tree]] = {}


def note_listings(listings: Iterable[Tree]) -> None:
    """Notes that the registered parameters (``param``) of these are listed for them."""
    for listing in listings:
        key = id(listing.param)
        before = _listings.get(key)
        if before is None or before() is not listing:
            _listings[key] = weakref.ref(listing, partial(_forget, key))


def _forget(key: int, gone: object) -> None:
    if _listings.get(key) is gone:
        del _listings[key]


def listing_of(param: torch.Tensor) -> Tree:
    """Finds what a registered parameter or DTensor is listed for: a flat parameter, or a part of one; else None."""
    found = _listings.get(id(param))
    listing = None if found is None else found()
    return listing if listing is not None and listing.param is param else None


def are_registered(ids: Iterable[int]) -> bool:
    """Says whether one of them may be that of a registered parameter; :func:`listing_of` tells of which."""
    return not _listings.keys().isdisjoint(ids)


def shard_behind(param: torch.Tensor) -> Tree:
    """Finds it for plain tensors alone: shards, whose parts are on other ranks and nobody says so."""
    listing = listing_of(param)
    return None if listing is None or is_dtensor(param) else listing


# What an optimizer lists in place of shards, and the shard that its step changes.
_stand_ins: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_stand_in(listed: torch.Tensor, shard: torch.Tensor) -> None:
    """Notes that steps of an optimizer that lists this tensor change that shard."""
    _stand_ins[listed] = weakref.ref(shard)


def changed_by_steps(listed: torch.Tensor) -> torch.Tensor:
    """Returns what the step of an optimizer that lists a tensor changes: the tensor, or what it stands for."""
    found = _stand_ins.get(listed)
    shard = None if found is None else found()
    return listed if shard is None else shard


def lists_stand_ins(optimizer: Optimizer) -> bool:
    """Says whether an optimizer lists what stands for shards: its state is whole."""
    return any(changed_by_steps(p) is not p for g in optimizer.param_groups for p in g["params"])


def refuse_stand_ins(optimizer: Optimizer, what: str) -> None:
    """Raises ConfigurationError if an optimizer's state is whole where that of shards is asked for.

    Args:
        what: what was asked for.
    """
    if lists_stand_ins(optimizer):
        raise ConfigurationError(
            f"{what}: the state of this {type(optimizer).__name__} is whole already, by the model's own names, and not "
            "of FSDP's shards. Save optimizer.state_dict() (all ranks call it), and load it with "
            "optimizer.load_state_dict()"
        )


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
