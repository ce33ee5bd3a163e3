"""torch.distributed.checkpoint.state_dict for models of :mod:`shardkit.torch_fsdp`: the same functions and formats.

Models without such modules are handed on to torch's functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from shardkit.errors import ConfigurationError
from shardkit.fsdp.state import plain_name
from shardkit.types import IncompatibleKeys, StateDict

from .fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from .fully_sharded_data_parallel import begun

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = Optimizer | Iterable[Optimizer]

# as they are before :func:`shardkit.torch_fsdp.install` serves those below in their places
torchs = {name: vars(theirs)[name] for name in __all__ if name != "StateDictOptions"}


def _is_ours(
    model: nn.Module, options: StateDictOptions | None, submodules: set[nn.Module] | None = None
) -> bool:
    if not FSDP.fsdp_modules(model):
        return False
    options = options or StateDictOptions()
    refused = [n for n in ("ignore_frozen_params", "flatten_optimizer_state_dict") if getattr(options, n)]
    refused += ["submodules"] if submodules else []
    if refused:
        raise ConfigurationError(
            f"{', '.join(refused)}: not with models of shardkit.torch_fsdp; take what you want by name from the whole"
        )
    return True


def _as(model: nn.Module, options: StateDictOptions) -> AbstractContextManager[None]:
    """Makes state dicts of the model as options of torch's functions say, inside of it."""
    on_cpu = options.cpu_offload
    if options.full_state_dict:
        full = FullStateDictConfig(on_cpu, on_cpu), FullOptimStateDictConfig(on_cpu, on_cpu)
        return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full)
    cut = ShardedStateDictConfig(on_cpu), ShardedOptimStateDictConfig(on_cpu)
    return FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *cut)


def _all(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


# ------------------------------------------------------------ get
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> StateDict:
    """Returns torch's: DTensors, or full values by ``full_state_dict`` (with ``cpu_offload`` on rank 0 alone)."""
    if not _is_ours(model, options, submodules):
        return torchs["get_model_state_dict"](model, submodules=submodules, options=options)
    with _as(model, options or StateDictOptions()):
        return {plain_name(name): value for name, value in model.state_dict().items()}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """Returns the same for optimizers, by names. One that never stepped gives what its first step would make."""
    if not _is_ours(model, options, submodules):
        return torchs["get_optimizer_state_dict"](model, optimizers, submodules=submodules, options=options)
    found: StateDict = {"state": {}, "param_groups": []}
    with _as(model, options or StateDictOptions()):
        for optimizer in _all(optimizers):
            with begun(model, optimizer):
                own = FSDP.optim_state_dict(model, optimizer)
            found["state"].update(own.get("state", {}))
            found["param_groups"] += own.get("param_groups", [])
    return found if found["param_groups"] else {}


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[StateDict, StateDict]:
    """Does both."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


# ------------------------------------------------------------ set
def set_model_state_dict(
    model: nn.Module, model_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Loads what :func:`get_model_state_dict` gave, at any world size, or one process's state dict."""
    options = options or StateDictOptions()
    whole: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile's, whose names have that in them
    if not _is_ours(model, options) or options.broadcast_from_rank0:
        return torchs["set_model_state_dict"](whole, model_state_dict, options=options)
    return whole.load_state_dict(model_state_dict, strict=options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: StateDict,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Does the same for optimizers; with ``broadcast_from_rank0`` only the first rank's counts."""
    options = options or StateDictOptions()
    if not _is_ours(model, options):
        return torchs["set_optimizer_state_dict"](model, optimizers, optim_state_dict, options=options)
    for optimizer in _all(optimizers):
        if options.broadcast_from_rank0:
            part = FSDP.scatter_full_optim_state_dict(optim_state_dict, model, optim=optimizer)
        else:
            part = FSDP.flatten_sharded_optim_state_dict(optim_state_dict, model, optimizer)
        optimizer.load_state_dict(part)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: StateDict,
    optim_state_dict: StateDict,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Does both; without values for the model the optimizers alone, as torch."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    if not model_state_dict and not (options and options.broadcast_from_rank0):
        return IncompatibleKeys([], [])
    return set_model_state_dict(model, model_state_dict, options=options)
