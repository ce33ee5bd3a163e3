"""shardkit.fair_dev.testing.testing at its path up to fairscale 0.4.6, which the documentation still uses."""

from shardkit.fair_dev.testing.testing import (
    DummyProcessGroup,
    check_same_model_params,
    dist_init,
    in_temporary_directory,
    objects_are_equal,
    rmf,
    set_random_seed,
    state_dict_norm,
    teardown,
    temp_files_ctx,
)

__all__ = [
    "DummyProcessGroup",
    "check_same_model_params",
    "dist_init",
    "in_temporary_directory",
    "objects_are_equal",
    "rmf",
    "set_random_seed",
    "state_dict_norm",
    "teardown",
    "temp_files_ctx",
]
