"""The module between the FSDP wrapper and the wrapped module: it holds the listed parameters (shards)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from ..errors import LifecycleError
from ..flattening.flat_parameter import FlatParameter, ParamInfo, SharedParamInfo
from ..flattening.wrapper import FlattenParamsWrapper
from ..types import Memo, StateDict, Tree
from .flat_param import FlatParam
from .originals import OriginalParameter, Place
from .registries import hide, register, show, unregister


class UnitModule(FlattenParamsWrapper):
    """Lists a unit's shards as ``flat_param_0``, ... or, unflattened, under the parameters' own names.

    To readers it is a :class:`FlattenParamsWrapper`, whose names and attributes it has; but the parameters are original
    parameters of sharded flat parameters, and the FSDP module around it moves them.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fpw_module = module
        self.is_flattened = True
        self.flat_param_names = []
        self.num_params_managed = 0
        self._unflattened_for_load = None
        self._auto_unflatten_state_dict = False

    @property
    def flat_params(self) -> list[FlatParameter]:  # type: ignore[override]
        """The listed flat parameters (this rank's shards)."""
        found = [self._parameters.get(name) for name in self.flat_param_names]
        return [p for p in found if isinstance(p, FlatParameter)]

    def list_flat(
        self,
        originals: Sequence[OriginalParameter],
        infos: list[ParamInfo],
        shared: list[SharedParamInfo],
        shard: torch.Tensor,
    ) -> tuple[nn.Parameter, Place]:
        """Takes parameters out of their modules' lists, and lists their shard as a flat parameter.

        Returns:
            The registered parameter and where it is listed.
        """
        for original in originals:
            for place in original.places:
                hide(place, original.param)
        flat = FlatParameter([shard], originals[0].param.requires_grad)
        flat.__setstate__(([m.shape.numel() for m in originals], [m.shape for m in originals], infos, shared))
        name = f"flat_param_{len(self.flat_param_names)}"
        self.flat_param_names.append(name)
        self.register_parameter(name, flat)
        return flat, Place(self, name)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What torch.distributed.checkpoint leaves out of names."""
        return {"": "_fpw_module"}

    # What the standalone wrapper does about views and state dicts, the FSDP module does here.
    def forward(self, *inputs: object, **kwinputs: object) -> Tree:
        """The wrapped module's forward."""
        return self._fpw_module(*inputs, **kwinputs)

    def unflatten_params(self, flat_params: object = None) -> NoReturn:
        """Not here.

        Raises:
            LifecycleError: always.
        """
        raise LifecycleError(
            "parameters of an FSDP module are sharded; use its summon_full_params() to see them unflattened"
        )

    _apply = nn.Module._apply
    state_dict = nn.Module.state_dict
    load_state_dict = nn.Module.load_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    __setstate__ = nn.Module.__setstate__

    def __deepcopy__(self, memo: Memo) -> UnitModule:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> StateDict:
        """Without what answers for the wrapper around it, which may be copied later: that one gives it anew."""
        return {name: value for name, value in self.__dict__.items() if name != "state_dict"}


def list_in_place(
    originals: Sequence[OriginalParameter], shard: torch.Tensor, world_size: int
) -> nn.Parameter:
    """Lists the shard of one parameter, [S], where the parameter was listed; of one rank, in the parameter's shape.

    Returns:
        The registered parameter.
    """
    (original,) = originals
    values = shard.view(original.shape) if world_size == 1 else shard
    listed = nn.Parameter(values, requires_grad=original.param.requires_grad)
    for place in original.places:
        hide(place, original.param)
        register(place, listed)
    return listed


@contextmanager
def exposed(flat: FlatParam) -> Iterator[None]:
    """Inside, the original parameters are listed under their own names, and registered ones are not."""
    # where they are listed: not in units that only borrow them
    listed = [
        (listing.param, [p for p in listing.places if p.module._parameters.get(p.name) is listing.param])
        for listing in flat.listings
    ]
    for _, places in listed:
        for place in places:
            unregister(place)
    for original in flat.originals:
        for place in original.places:
            show(place, original.param)
    try:
        yield
    finally:
        for original in flat.originals:
            for place in original.places:
                now = place.module._parameters.get(place.name)
                if now is not None and now is not original.param:  # somebody put another parameter in
                    original.param.data = now.data
                hide(place, original.param)
        for param, places in listed:
            for place in places:
                register(place, param)
