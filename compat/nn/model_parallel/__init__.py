"""fairscale.nn.model_parallel."""

from shardkit.model_parallel import *  # noqa: F403

__all__: list[str] = []  # fairscale's is empty too
