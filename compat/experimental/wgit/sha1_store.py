"""fairscale.experimental.wgit.sha1_store."""

from shardkit.internal.containers import from_np, to_np
from shardkit.redirected import redirected

from .utils import ExitCode

__all__ = ["ExitCode", "SHA1_Store", "from_np", "to_np"]

SHA1_Store = redirected(
    "experimental.wgit.sha1_store.SHA1_Store",
    "DVC or git-lfs, with weights in safetensors",
    why="an unfinished experiment; tools made for it store large files by their hash",
)
