"""The methods of torch's FullyShardedDataParallel about state of optimizers."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.api import FullOptimStateDictConfig, StateDictSettings, StateDictType
from torch.optim import Optimizer

from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup, SavedState, StateDict

from . import named, settings
from .facts import TorchFacts
from .named import OptimInput


class OptimizerStates(TorchFacts):
    """State by names of original parameters. All are functions of a model, which need be no FSDP module itself."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """An optimizer's state by names of original parameters (collective).

        Args:
            model: outermost module, whose settings say whether it is full or holds DTensors.
            optim: the optimizer, made of ``model.parameters()``.
            optim_state_dict: its ``state_dict()`` by default.
            group: accepted; units know their ranks.

        Raises:
            ConfigurationError: the optimizer is not this model's.
        """
        first, own = _first_of(model)
        config = own.optim_state_dict_config
        if own.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            ranks = first._passed_group.value
            return named.sharded(model, ranks, optim, optim_state_dict, config.offload_to_cpu)
        rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        return named.full(model, first._state, optim, optim_state_dict, rank0_only, config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup = None,
    ) -> StateDict:
        """This rank's part of such a state, for ``optim.load_state_dict`` (collective with ``rank0_only``).

        Raises:
            ConfigurationError: it is of another model, or by numbers; ``is_named_optimizer``.
        """
        _, own = _first_of(model)
        named.check_kind(own.state_dict_type, is_named_optimizer)
        config = own.optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            part = named.to_load_from_rank_0(model, optim, optim_state_dict, group)
        else:
            part = named.to_load(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(part)
        return part

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: ProcessGroup = None,
    ) -> StateDict:
        """:meth:`optim_state_dict` with FULL_STATE_DICT, on the CPU."""
        return named.full(model, _first_of(model)[0]._state, optim, None, rank0_only, True)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: ProcessGroup = None) -> StateDict:
        """:meth:`optim_state_dict` with SHARDED_STATE_DICT."""
        return named.sharded(model, _first_of(model)[0]._passed_group.value, optim, None, True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: SavedState,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """This rank's part of a full state that every rank has."""
        optim = named.optimizer_of(model, optim, optim_input)
        return named.to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: SavedState, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """This rank's part of what :meth:`sharded_optim_state_dict` returned (collective)."""
        return named.to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: SavedState | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """This rank's part of a full state that the first rank has (collective); others pass None."""
        optim = named.optimizer_of(model, optim, optim_input)
        return named.to_load_from_rank_0(model, optim, full_optim_state_dict, group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: SavedState,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """State by names of an unwrapped model's parameters from state by numbers, or the other way round.

        Raises:
            ConfigurationError: it is of other parameters.
        """
        return named.rekeyed(optim_state_dict, optim_state_key_type, model, optim, optim_input)


def _first_of(model: nn.Module) -> tuple[TorchFacts, StateDictSettings]:
    """The outermost unit of a model, and the settings of all."""
    found = TorchFacts.fsdp_modules(model)
    own = settings.settings_of(found)
    if own is None:
        raise ConfigurationError(
            f"there is no FSDP module in this {type(model).__name__}; pass the wrapped model"
        )
    return found[0], own
