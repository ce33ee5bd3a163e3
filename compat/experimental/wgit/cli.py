"""fairscale.experimental.wgit.cli."""

from shardkit.redirected import redirected_function

from .repo import Repo
from .version import __version_tuple__ as version

__all__ = ["Repo", "main", "version"]

main = redirected_function(
    "experimental.wgit.cli.main",
    "the commands of DVC or git-lfs",
    why="an unfinished experiment; tools made for it version large files",
)
