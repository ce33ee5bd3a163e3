"""torch's functions for optimizer state of FSDP models: by names of original parameters, full or as DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.api import FullOptimStateDictConfig, StateDictSettings, StateDictType
from torch.optim import Optimizer

from shardkit.backend import backend_of_job
from shardkit.errors import ConfigurationError
from shardkit.fsdp.optim_state import parameters_of
from shardkit.fsdp.state import plain_name
from shardkit.optimizer_state.forms import (
    Form,
    Source,
    from_rank_0,
    from_state,
    gather_by_name,
    shard_by_name,
)
from shardkit.optimizer_state.slots import Slot
from shardkit.torch_seams.dtensors import cut_rows, mesh_over
from shardkit.types import ParamGroup, ProcessGroup, SavedState, StateDict

from . import facts
from .facts import TorchFacts

OptimInput = list[ParamGroup] | Iterable[nn.Parameter]


class OptimizerStates(TorchFacts):
    """State by names of original parameters. All are functions of a model, which need be no FSDP module itself."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns an optimizer's state by names of original parameters (collective).

        Args:
            model: outermost module, whose settings say whether it is full or holds DTensors.
            optim: the optimizer, made of ``model.parameters()``.
            optim_state_dict: its ``state_dict()`` by default.
            group: accepted; units know their ranks.

        Raises:
            ConfigurationError: the optimizer is not this model's.
        """
        _, own = _first_of(model)
        config = own.optim_state_dict_config
        if own.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            return _sharded(model, optim, optim_state_dict, config.offload_to_cpu)
        rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        return _full(model, optim, optim_state_dict, rank0_only, config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns this rank's part of such a state, for ``optim.load_state_dict`` (collective with ``rank0_only``).

        Raises:
            ConfigurationError: it is of another model, or by numbers; ``is_named_optimizer``.
        """
        _, own = _first_of(model)
        if is_named_optimizer:
            raise ConfigurationError(
                "is_named_optimizer=True: optimizers that name their parameters themselves are not taken; use one of "
                "torch.optim, whose state is named here"
            )
        if own.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ConfigurationError("there is no optimizer state of LOCAL_STATE_DICT; use FULL or SHARDED")
        config = own.optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            part = _from_rank_0(model, optim, optim_state_dict, group)
        else:
            part = _cut(model, optim, optim_state_dict)
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
        """Returns :meth:`optim_state_dict` with FULL_STATE_DICT, on the CPU."""
        _warn_of(optim_input)
        return _full(model, optim, None, rank0_only, True)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: ProcessGroup = None) -> StateDict:
        """Returns :meth:`optim_state_dict` with SHARDED_STATE_DICT."""
        return _sharded(model, optim, None, True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: SavedState,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Returns this rank's part of a full state that every rank has."""
        optim = _optimizer_of(model, optim, optim_input)
        return _cut(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: SavedState, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """Returns this rank's part of what :meth:`sharded_optim_state_dict` returned (collective)."""
        return _cut(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: SavedState | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns this rank's part of a full state that the first rank has (collective); others pass None."""
        optim = _optimizer_of(model, optim, optim_input)
        return _from_rank_0(model, optim, full_optim_state_dict, group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: SavedState,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Returns state by names of a model's parameters from state by numbers, or the other way round.

        Args:
            model: not wrapped.
            optim, optim_input: say the order of numbers; by default that of ``model.parameters()``.

        Raises:
            ConfigurationError: the keys are not what is expected, or of other parameters.
        """
        name_of = {p: plain_name(n) for n, p in model.named_parameters()}
        params = [p for g in _optimizer_of(model, optim, optim_input).param_groups for p in g["params"]]
        keys = [k for g in optim_state_dict["param_groups"] for k in g["params"]]
        by_name = all(isinstance(k, str) for k in keys)
        if by_name == (optim_state_key_type is OptimStateKeyType.PARAM_NAME):
            return dict(optim_state_dict)
        if by_name:
            position = {name_of[p]: i for i, p in enumerate(params)}
            new: dict[object, int | str | None] = {k: position.get(plain_name(k)) for k in keys}
        else:
            new = {k: name_of[params[k]] if k < len(params) else None for k in keys}
        unknown = [k for k, v in new.items() if v is None]
        if unknown:
            raise ConfigurationError(
                f"optimizer state of {unknown[0]!r}, which is no parameter of this model"
            )
        # sorted: torch goes by the places of numbers when it loads
        listed = [[new[k] for k in g["params"]] for g in optim_state_dict["param_groups"]]
        groups = [
            {**g, "params": sorted(own) if by_name else own}
            for g, own in zip(optim_state_dict["param_groups"], listed, strict=True)
        ]
        states = {new.get(k, k): v for k, v in optim_state_dict["state"].items()}
        return {**optim_state_dict, "state": states, "param_groups": groups}


def _first_of(model: nn.Module) -> tuple[TorchFacts, StateDictSettings]:
    """Returns the outermost unit of a model, and the settings of all."""
    found = TorchFacts.fsdp_modules(model)
    own = facts.settings_of(found)
    if own is None:
        raise ConfigurationError(
            f"there is no FSDP module in this {type(model).__name__}; pass the wrapped model"
        )
    return found[0], own


def _cut(model: nn.Module, optim: Optimizer, state: SavedState) -> StateDict:
    part = _part(model, optim, state.get("param_groups", ()), from_state(_plain(state["state"])))
    if "param_groups" not in state:  # whoever left them out has them
        del part["param_groups"]
    return part


def _plain(state: SavedState) -> StateDict:
    """Returns state by names, without what wrapping added to them."""
    return {plain_name(name): values for name, values in state.items() if isinstance(name, str)}


def _part(model: nn.Module, optim: Optimizer, groups: Iterable[ParamGroup], source: Source) -> StateDict:
    named = [
        {**g, "params": [plain_name(n) if isinstance(n, str) else n for n in g["params"]]} for g in groups
    ]
    return shard_by_name(parameters_of(model, optim), optim, named, source)


def _gathered(
    model: nn.Module, optim: Optimizer, state: StateDict | None, form: Form, keep: bool = True
) -> StateDict:
    saved = optim.state_dict() if state is None else state
    return gather_by_name(parameters_of(model, optim), optim, saved, form, keep)


def _full(
    model: nn.Module, optim: Optimizer, state: StateDict | None, rank0_only: bool, on_cpu: bool
) -> StateDict:
    """Gathers full state by names (collective); empty on other ranks than the first with ``rank0_only``."""

    def form(slot: Slot, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return part if on_cpu else part.to(like.device)

    keep = not rank0_only or facts.is_first(_first_of(model)[0]._state)
    return _gathered(model, optim, state, form, keep)


def _sharded(model: nn.Module, optim: Optimizer, state: StateDict | None, on_cpu: bool) -> StateDict:
    """Returns the same with DTensors (collective)."""

    ranks = _first_of(model)[0]._passed_group.value
    replicas = {
        id(f.param): m._state.replicas for m in TorchFacts.fsdp_modules(model) for f in m._state.listings
    }

    def form(slot: Slot, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if slot.group is None or (slot.world_size == 1 and replicas.get(id(slot.param)) is not None):
            return part
        made = cut_rows(part, mesh_over(ranks, slot.group.backend.device_type))
        return made.cpu() if on_cpu else made.to(like.device)

    return _gathered(model, optim, state, form)


def _from_rank_0(
    model: nn.Module, optim: Optimizer, state: SavedState | None, group: ProcessGroup
) -> StateDict:
    """Returns the same where only the first rank has the state (collective)."""
    ranks = backend_of_job().group(group)
    control = ranks.channel("control")
    mine = state if ranks.rank == 0 else None
    told = None if mine is None else mine.get("param_groups", [])
    groups = control.broadcast_object(told, 0, label="optimizer options of rank 0")
    if groups is None:
        raise ConfigurationError("the first rank passed no optimizer state; it has to have the full one")
    return _part(model, optim, groups, from_rank_0(_plain((mine or {}).get("state", {})), ranks))


def _warn_of(optim_input: OptimInput | None) -> None:
    if optim_input is not None:
        text = "The `optim_input` argument is deprecated. Pass the optimizer as `optim` instead"
        warnings.warn(text, FutureWarning, stacklevel=4)


def _optimizer_of(model: nn.Module, optim: Optimizer | None, optim_input: OptimInput | None) -> Optimizer:
    """Returns the optimizer, or one that stands for the parameters which an optimizer was given."""
    _warn_of(optim_input)
    if optim is not None:
        return optim
    given = [*model.parameters()] if optim_input is None else [*optim_input]
    # an optimizer fills in dicts that it is given: these stay the caller's
    copied = [{"params": g["params"]} if isinstance(g, dict) else g for g in given]
    return torch.optim.SGD(copied, lr=0.0)  # type: ignore[arg-type]
