"""Which parameters are shards: parts of flat parameters, of which each rank lists its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
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


# What an optimizer lists in place of shards, and the shard that its step changes.
_stand_ins: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_stand_in(listed: torch.Tensor, shard: torch.Tensor) -> None:
    """Steps of an optimizer that lists this tensor change that shard."""
    _stand_ins[listed] = weakref.ref(shard)


def changed_by_steps(listed: torch.Tensor) -> torch.Tensor:
    """Returns what the step of an optimizer that lists a tensor changes: the tensor, or what it stands for."""
    found = _stand_ins.get(listed)
    shard = None if found is None else found()
    return listed if shard is None else shard


def lists_stand_ins(optimizer: Optimizer) -> bool:
    """Whether an optimizer lists what stands for shards: its state is whole."""
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
