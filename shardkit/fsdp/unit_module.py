"""The module between the FSDP wrapper and the wrapped module: it holds the listed parameters (shards)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .flat_param import FlatParam, Member, Place


class UnitModule(nn.Module):
    """Lists a unit's shards as ``flat_param_0``, ... or, unflattened, under the parameters' own names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module

    def adopt(
        self, members: Sequence[Member], shard: torch.Tensor, flatten: bool, name: str
    ) -> tuple[nn.Parameter, Place]:
        """Takes parameters out of their modules' lists, and lists their shard.

        Returns:
            The listed parameter and where it is listed.
        """
        first = members[0]
        trainable = first.param.requires_grad
        for member in members:
            for place in member.places:
                _hide(place, member.param)
        listed = nn.Parameter(shard, requires_grad=trainable)
        if flatten:
            self.register_parameter(name, listed)
            return listed, Place(self, name)
        for place in first.places:
            place.module._parameters[place.name] = listed
        return listed, first.places[0]


@contextmanager
def exposed(flat: FlatParam) -> Iterator[None]:
    """Inside, the members are listed under their own names, and the shard is not."""
    holder = flat.holder
    listed = holder.module._parameters[holder.name]
    holder.module._parameters[holder.name] = None
    for member in flat.members:
        for place in member.places:
            place.module.__dict__.pop(place.name, None)
            place.module._parameters[place.name] = member.param
    try:
        yield
    finally:
        for member in flat.members:
            for place in member.places:
                now = place.module._parameters.get(place.name)
                if now is not None and now is not member.param:  # somebody put another parameter in
                    member.param.data = now.data
                _hide(place, member.param)
        if flat.is_listed_flat:
            holder.module._parameters[holder.name] = listed
        else:
            for place in flat.members[0].places:
                place.module._parameters[place.name] = listed


def _hide(place: Place, param: nn.Parameter) -> None:
    """The parameter is still an attribute, but not listed; None keeps its place in the order."""
    place.module._parameters[place.name] = None
    place.module.__dict__[place.name] = param
