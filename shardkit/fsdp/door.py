"""The door that wraps: a module around the one that is sharded."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..flattening.keys import translates_loaded
from ..progress import noting_errors
from ..torch_seams.compiling import callees_compiled
from ..torch_seams.forward_signature import signed_as_wrapped
from ..torch_seams.other_wrappers import check_wrappable, note_wrapper
from ..types import IncompatibleKeys, Memo, SavedState, StateDict, Tree
from . import inside, moving
from . import state_dict as state_dicts
from .calls import cast_inputs, run_summoned
from .construct import shard_module, wake
from .lazy import saving_originals_by_name
from .refusals import check_asker
from .registered_shard import flat_of_registered
from .running import enter, fail, input_dtype, leave, watched
from .sharded_api import ShardedAPI
from .standing_in import StandingIn
from .state import Ignored, Options, ShardingState
from .summoning import summoned
from .unit_module import UnitModule

Self = TypeVar("Self", bound="Door")


class Door(StandingIn, ShardedAPI):
    """What all wrappers share: forward through the unit, state dicts of the wrapped module, being moved and copied.

    Abstract: a wrapper has its own arguments, and calls :meth:`_shard` with what they mean. What wrappers of compat may
    define otherwise is abstract too; they leave everything else as it is.
    """

    def _shard(self, module: nn.Module, options: Options, ignored: Ignored | None = None) -> None:
        """Wraps a module; see :class:`~shardkit.FSDP` for what is raised."""
        nn.Module.__init__(self)
        state = ShardingState(self, module, options, ignored)
        check_wrappable(module, type(self).__name__, may_hold=Door, without=state.ignored.modules)
        unit_module = UnitModule(module)
        shard_module(state, unit_module)
        self._fsdp_wrapped_module = unit_module
        self._state = state
        inside.answer_for(state)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    # ------------------------------------------------------------ forward
    @signed_as_wrapped
    @callees_compiled
    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Runs the module with its parameters gathered."""
        state = self._state
        if state.is_asleep:
            wake(state)
        dtype = input_dtype(state)
        if state.summoned is not None:
            state.cast_buffers()
            if dtype is not None:
                args, kwargs = cast_inputs((args, kwargs), dtype)
            return run_summoned(state.module, state.unit.needs, args, kwargs)
        entered = enter(state, args, kwargs)
        try:
            if dtype is not None:
                args, kwargs = cast_inputs((args, kwargs), dtype)
            if state.unit.has_frozen:
                entered = watched(entered, state, (args, kwargs))
            module = state.module
            if entered.engine.is_lazy:
                with saving_originals_by_name():
                    outputs = module(*args, **kwargs)
            else:
                outputs = module(*args, **kwargs)
        except BaseException as error:
            fail(state, entered, error)
            raise
        return leave(state, entered, outputs)

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """As ``nn.Module.apply`` of the wrapped module, with full parameters whose changes are kept (collective).

        ``fn`` gets the modules of the unwrapped model, once each, and no wrappers: these have the attributes of what
        they wrap, so that a function that looks for a ``weight`` would initialize it once more.
        """
        with summoned(self._state, recurse=False, writeback=True):
            self._state.module.apply(fn)
        return self

    # ------------------------------------------------------------ state dicts
    @abc.abstractmethod
    def state_dict(self, *args: Any, **kwargs: Any) -> Tree:
        """See :meth:`_full_state_dict`."""

    @noting_errors
    def _full_state_dict(self, *args: Any, **kwargs: Any) -> Tree:
        """Full parameters under the wrapped module's own names, in full precision, on every rank (collective).

        They are copies: writing to one changes nothing here.
        """
        check_asker(self, keeps_names=False)
        return self._door_state_dict(*args, **kwargs)

    def _door_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        return state_dicts.full(self._state, super().state_dict, *args, **kwargs)

    @noting_errors
    def load_state_dict(
        self, state_dict: SavedState, strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Loads a full state dict (collective); each rank keeps its shard. Arguments and result are ``nn.Module``'s."""
        with state_dicts.loading(self):
            return self._load_door(state_dict, strict, assign)

    def _load_door(
        self, state_dict: SavedState, strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        return super().load_state_dict(state_dict, strict, assign)

    # ------------------------------------------------------------ being moved and copied
    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moving.begin_move(self._state)
        with inside.moving():
            super()._apply(fn, recurse)
        moving.end_move(self._state)
        return self

    def __deepcopy__(self: Self, memo: Memo) -> Self:
        moving.check_copied(self._state, memo)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> StateDict:
        moving.check_pickled(self._state)
        return self.__dict__.copy()

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        # units below that share weights with ones that were copied after them wait for this one
        waiting = [s for s in self._state.states() if s.is_asleep]
        wake(self._state)
        for woken in waiting:
            if isinstance(woken.door, Door) and not woken.is_asleep:
                inside.answer_for(woken)


def _before_load(door: Door, state_dict: StateDict, prefix: str, *others: object) -> None:
    state_dicts.begin_loading(door._state, state_dict)
    if translates_loaded():
        state_dicts.add_wrapping(door, state_dict, prefix)


def _after_load(door: Door, incompatible: IncompatibleKeys) -> None:
    state_dicts.clean_names(incompatible)
    state_dicts.end_loading(door._state)


note_wrapper(Door, owns=lambda param: flat_of_registered(param) is not None)
