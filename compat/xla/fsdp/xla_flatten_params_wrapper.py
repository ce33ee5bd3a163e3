"""torch_xla.distributed.fsdp.xla_flatten_params_wrapper: torch_xla's own, which no part of shardkit's FSDP needs."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    import torch_xla.distributed.fsdp.xla_flatten_params_wrapper as original

    found: object = getattr(original, name)
    return found
