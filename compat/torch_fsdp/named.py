"""torch's functions for optimizer state of FSDP models: by names of original parameters, full or as DTensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.api import StateDictType
from torch.optim import Optimizer

from shardkit.backend import backend_of_job
from shardkit.errors import ConfigurationError
from shardkit.extra.named_state import cut_named, from_rank_0, from_state, gather_named
from shardkit.fsdp.names import plain_name
from shardkit.fsdp.state import ShardingState
from shardkit.torch_seams.dtensors import cut_rows, mesh_over
from shardkit.types import ParamGroup, ProcessGroup, SavedState, StateDict

from .settings import is_first

OptimInput = list[ParamGroup] | Iterable[nn.Parameter]


def full(
    model: nn.Module, first: ShardingState, optim: Optimizer, state: StateDict | None,
    rank0_only: bool, on_cpu: bool,
) -> StateDict:  # fmt: skip
    """Full state by names (collective); empty on other ranks than the first with ``rank0_only``."""

    def form(unit: ShardingState, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return part if on_cpu else part.to(like.device)

    keep = not rank0_only or is_first(first)
    return gather_named(model, optim, optim.state_dict() if state is None else state, form, keep)


def sharded(
    model: nn.Module, ranks: object, optim: Optimizer, state: StateDict | None, on_cpu: bool
) -> StateDict:
    """The same with DTensors (collective)."""

    def form(unit: ShardingState, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if unit.group.world_size == 1 and unit.replicas is not None:
            return part
        made = cut_rows(part, mesh_over(ranks, unit.group.backend.device_type))
        return made.cpu() if on_cpu else made.to(like.device)

    return gather_named(model, optim, optim.state_dict() if state is None else state, form)


def to_load(model: nn.Module, optim: Optimizer, state: SavedState) -> StateDict:
    """This rank's part of a full or sharded state by names, for ``optim.load_state_dict``."""
    return cut_named(model, optim, state.get("param_groups", ()), from_state(state["state"]))


def to_load_from_rank_0(
    model: nn.Module, optim: Optimizer, state: SavedState | None, group: ProcessGroup
) -> StateDict:
    """The same where only the first rank has the state (collective)."""
    ranks = backend_of_job().group(group)
    control = ranks.channel("control")
    mine = state if ranks.rank == 0 else None
    told = None if mine is None else mine.get("param_groups", [])
    groups = control.broadcast_object(told, 0, label="optimizer options of rank 0")
    if groups is None:
        raise ConfigurationError("the first rank passed no optimizer state; it has to have the full one")
    return cut_named(model, optim, groups, from_rank_0((mine or {}).get("state", {}), ranks))


def optimizer_of(model: nn.Module, optim: Optimizer | None, optim_input: OptimInput | None) -> Optimizer:
    """The optimizer, or one that stands for the parameters which an optimizer was given."""
    if optim is not None:
        return optim
    given = [*model.parameters()] if optim_input is None else [*optim_input]
    # an optimizer fills in dicts that it is given: these stay the caller's
    copied = [{"params": g["params"]} if isinstance(g, dict) else g for g in given]
    return torch.optim.SGD(copied, lr=0.0)  # type: ignore[arg-type]


def check_kind(kind: StateDictType, named: bool) -> None:
    """Refuses what can't be loaded here."""
    if named:
        raise ConfigurationError(
            "is_named_optimizer=True: optimizers that name their parameters themselves are not taken; use one of "
            "torch.optim, whose state is named here"
        )
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise ConfigurationError("there is no optimizer state of LOCAL_STATE_DICT; use FULL or SHARDED")


# ------------------------------------------------------------ keys
def rekeyed(
    state: SavedState, kind: OptimStateKeyType, model: nn.Module, optim: Optimizer | None,
    optim_input: OptimInput | None,
) -> StateDict:  # fmt: skip
    """State by names of a model's parameters from state by numbers, or the other way round.

    Args:
        model: not wrapped.
        optim, optim_input: say the order of numbers; by default that of ``model.parameters()``.

    Raises:
        ConfigurationError: the keys are not what is expected, or of other parameters.
    """
    name_of = {p: plain_name(n) for n, p in model.named_parameters()}
    params = [p for g in optimizer_of(model, optim, optim_input).param_groups for p in g["params"]]
    keys = [k for g in state["param_groups"] for k in g["params"]]
    by_name = all(isinstance(k, str) for k in keys)
    if by_name == (kind is OptimStateKeyType.PARAM_NAME):
        return dict(state)
    if by_name:
        position = {name_of[p]: i for i, p in enumerate(params)}
        new: dict[object, int | str | None] = {k: position.get(plain_name(k)) for k in keys}
    else:
        new = {k: name_of[params[k]] if k < len(params) else None for k in keys}
    unknown = [k for k, v in new.items() if v is None]
    if unknown:
        raise ConfigurationError(f"optimizer state of {unknown[0]!r}, which is no parameter of this model")
    # sorted: torch goes by the places of numbers when it loads
    listed = [[new[k] for k in g["params"]] for g in state["param_groups"]]
    groups = [
        {**g, "params": sorted(own) if by_name else own}
        for g, own in zip(state["param_groups"], listed, strict=True)
    ]
    states = {new.get(k, k): v for k, v in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}
