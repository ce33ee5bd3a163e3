"""fairscale.nn.model_parallel."""

from shardkit.compat.redirected import redirected_names
from shardkit.model_parallel import *  # noqa: F403

__all__: list[str] = []  # fairscale's is empty too

__getattr__ = redirected_names(__name__)
