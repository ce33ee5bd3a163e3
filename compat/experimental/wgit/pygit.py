"""fairscale.experimental.wgit.pygit."""

from shardkit.redirected import redirected

__all__ = ["PyGit"]

PyGit = redirected("experimental.wgit.pygit.PyGit", "pygit2 or git itself", why="a thin layer over pygit2")
