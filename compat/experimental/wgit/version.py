"""fairscale.experimental.wgit.version."""

__version_tuple__ = (0, 0, 1)
