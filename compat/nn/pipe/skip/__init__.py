"""fairscale.nn.pipe.skip: skip connections over partitions."""

# The module first: its name is then taken by the function.
from . import skippable as _skippable  # type: ignore[import-not-found]  # isort: skip
from shardkit.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
