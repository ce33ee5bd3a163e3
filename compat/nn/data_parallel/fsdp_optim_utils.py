"""fairscale.nn.data_parallel.fsdp_optim_utils: optimizer state of sharded parameters, which FSDP's methods handle."""

from __future__ import annotations

from typing import Any

import torch

from shardkit.errors import ConfigurationError
from shardkit.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from shardkit.redirected import redirected_names

__all__ = [
    "FlattenParamsWrapper",
    "build_unflat_state_dict",
    "check_param_counts_before_sharding",
    "flatten_optim_state_dict",
    "is_singleton_tensor",
]

__getattr__ = redirected_names(__name__)


def check_param_counts_before_sharding(full_optim_state_dict: dict[str, Any], n_instances: int) -> None:
    """Checks that a full optimizer state was saved from as many FSDP instances.

    Raises:
        ConfigurationError: it was not.
    """
    saved = len(set(full_optim_state_dict["param_id_map"].values()))
    if full_optim_state_dict["state"] and saved != n_instances:
        raise ConfigurationError(
            f"the optimizer state was saved from {saved} FSDP instances, this model has {n_instances} (itself "
            "included); wrap it as it was when the state was saved"
        )


def is_singleton_tensor(x: Any) -> bool:
    """Whether it is a tensor without dimensions."""
    return torch.is_tensor(x) and x.dim() == 0
