"""shardkit.fair_dev.testing.testing at its path up to fairscale 0.4.6, which the documentation still uses."""

from shardkit.fair_dev.testing import testing
from shardkit.fair_dev.testing.testing import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(testing, name)
