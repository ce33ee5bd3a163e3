"""fairscale.nn.pipe.skip: skip connections over partitions."""

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline.skip import Namespace

from .skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]

__getattr__ = redirected_names(__name__)
