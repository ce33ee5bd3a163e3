"""shardkit's version as numbers."""

__version_tuple__ = (0, 2, 0)
