"""shardkit's version as numbers."""

__version_tuple__ = (0, 1, 0)
