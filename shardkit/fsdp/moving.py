"""Sharded modules that are moved, cast, copied, or brought back from a file."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from ..flattening.flat_parameter import FlatParameter
from ..types import Memo
from .construct import connect, wake
from .flat_param import FlatParam
from .originals import are_copied, note_copying
from .refusals import copy_when_summoned
from .state import ShardingState


def begin_move(state: ShardingState) -> None:
    """Before the module's tensors are moved or cast, or values are loaded into shards that are listed as they are.

    Raises:
        ConfigurationError: torch would swap tensors for others.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        raise ConfigurationError(
            "an FSDP module can't be moved, cast or loaded by swapping its parameters: they are views of one flat "
            "parameter. Call torch.__future__.set_swap_module_params_on_conversion(False) first"
        )
    state.unit.release()
    for flat in state.flats:
        flat.drop()


def end_move(state: ShardingState) -> None:
    """After shards were moved, cast, or replaced by other objects."""
    for flat in state.flats:
        _take_listed(flat)
    if state.flats and state.options.device is None:
        shard = state.flats[0].param
        if shard.device.type not in (state.group.backend.device_type, "meta"):
            connect(state, shard, [])
            state.unit.replicas = state.replicas
            for flat in state.flats:
                flat.group = state.group
    for flat in state.flats:
        flat.adopt()
    state.unit.attach()


def _take_listed(flat: FlatParam) -> None:
    if flat.shards is not None:
        flat.collect()
        return
    module, name = flat.places[0]
    param = module._parameters.get(name)
    if param is None or param is flat.param:
        return
    if isinstance(flat.param, FlatParameter) and not isinstance(param, FlatParameter):
        param = flat.param._like_this(param)
        module._parameters[name] = param
    flat.param = param
    for place in flat.places:
        place.module._parameters[place.name] = param


# ------------------------------------------------------------ copies
def check_copied(state: ShardingState, memo: Memo) -> None:
    """Notes that a unit and those below it are about to be copied.

    Raises:
        LifecycleError: inside of ``summon_full_params``.
    """
    wake(state)
    if are_copied(state.unit.needs, memo):
        return
    states = state.states()
    if any(s.summoned is not None for s in states):
        raise copy_when_summoned(state.group.rank)
    note_copying([f for s in states for f in s.unit.needs], memo)


def check_pickled(state: ShardingState) -> None:
    """Raises for what a file can't hold: LifecycleError when summoned, ConfigurationError for groups of ranks."""
    if state.summoned is not None:
        raise copy_when_summoned(state.group.rank)
    if state.replicas is not None:
        raise ConfigurationError(
            "an FSDP module with replicas can't be pickled: groups of ranks can't, and without them gradients "
            "would not be averaged. Save state_dict(), or use copy.deepcopy(), which keeps the groups"
        )
