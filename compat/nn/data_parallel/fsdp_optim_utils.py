"""fairscale.nn.data_parallel.fsdp_optim_utils: optimizer state of sharded parameters, which FSDP's methods handle."""

from __future__ import annotations

import torch

from shardkit.compat.redirected import redirected_names
from shardkit.errors import ConfigurationError
from shardkit.types import StateDict

__getattr__ = redirected_names(__name__)


def check_param_counts_before_sharding(full_optim_state_dict: StateDict, n_instances: int) -> None:
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


def is_singleton_tensor(x: object) -> bool:
    """Whether it is a tensor without dimensions."""
    return isinstance(x, torch.Tensor) and x.dim() == 0
