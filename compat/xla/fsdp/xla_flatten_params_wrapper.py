"""torch_xla.distributed.fsdp.xla_flatten_params_wrapper: torch_xla's own, which no part of shardkit's FSDP needs."""

from shardkit.xla.ranks import names_of

__getattr__ = names_of("torch_xla.distributed.fsdp.xla_flatten_params_wrapper")
