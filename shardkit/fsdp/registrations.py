"""What may be put where, once parameters are sharded: torch tells of everything that is registered in a module.

[Note: registrations] Parameters are taken out of their modules when a module is wrapped. One that is registered
later (a new head, an adapter, a parametrization, a larger embedding) would be in no flat parameter: each rank would
train its own. It is refused where torch registers it.
"""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigurationError
from ..torch_seams.dtensors import is_dtensor
from ..types import AnyCallable
from .inside import is_collecting
from .originals import Listing, managing
from .registered_shard import flat_of_registered, listing_of
from .state import ShardingState

# Modules whose parameters a unit has taken, and what is below them, but not below another unit.
_taken: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_taken(state: ShardingState) -> None:
    """From now on the parameters of a unit's modules are the unit's."""
    _watch()
    for _, m in state.own_modules():
        _taken[m] = True


@functools.cache
def _watch() -> None:
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(cast("AnyCallable", _on_parameter))  # its type lacks a result


def _on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or parent not in _taken:
        return
    new = [(path, m) for path, m in child.named_modules(prefix=name) if m not in _taken]
    for path, m in new:
        for attribute, param in m._parameters.items():
            if param is not None and flat_of_registered(param) is None:
                raise ConfigurationError(_too_late(parent, f"{path}.{attribute}"))
    for _, m in new:
        if not any(p is not None for p in m._parameters.values()):  # no other unit's
            _taken[m] = True


def _on_parameter(parent: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or parent not in _taken:
        return None
    before = parent._parameters.get(name)
    listing = None if before is None else listing_of(before)
    if listing is not None and is_dtensor(listing.param) and is_collecting():  # load_state_dict(assign=True)
        parent.__dict__[name] = listing.originals[0].param  # from where torch has taken it
        return _assigned(listing, param)
    flat = managing(param)
    if flat is not None and any(o.param is param and (parent, name) in o.places for o in flat.originals):
        return None  # torch puts back what it replaced for a call; the next forward hides it again
    if before is None or managing(before) is None:  # else it is summoned, and takes another one's values
        raise ConfigurationError(_too_late(parent, name))
    return None


@torch.no_grad()
def _assigned(listing: Listing, values: torch.Tensor) -> nn.Parameter:
    """The parameter that is listed stays, with these values: optimizers have it, and its memory is the shard's."""
    if listing.param.is_meta:
        raise ConfigurationError(
            f"load_state_dict(assign=True) into {listing.label}, which was sharded on the meta device: shards need "
            "memory of their own. Call to_empty(device=...) first, and assign=True is not needed then"
        )
    listing.param.copy_(values)
    return listing.param


def _too_late(module: nn.Module, name: str) -> str:
    return (
        f"parameter {name!r} is put into a {type(module).__name__} whose parameters FSDP has sharded: it would belong "
        "to no unit, and each rank would train its own. Change the module (heads, adapters, parametrizations, "
        "embeddings, tied weights) before it is wrapped, or wrap what is new in a unit of its own"
    )
