"""fairscale.optim.adam."""

from shardkit.extra.adam import Adam, Precision

__all__ = ["Adam", "Precision"]
