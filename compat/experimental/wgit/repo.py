"""fairscale.experimental.wgit.repo."""

import enum

from shardkit.redirected import redirected

from .pygit import PyGit
from .sha1_store import SHA1_Store

__all__ = ["PyGit", "Repo", "RepoStatus", "SHA1_Store", "SizeInfo"]

_VERSIONED = {
    "instead": "DVC or git-lfs, with weights in safetensors",
    "why": "an unfinished experiment (needs pygit2 and pgzip); tools made for it version large files",
}
Repo = redirected("experimental.wgit.repo.Repo", **_VERSIONED)
SizeInfo = redirected("experimental.wgit.repo.SizeInfo", **_VERSIONED)


class RepoStatus(enum.Enum):
    """What has changed since the last commit."""

    CLEAN = 1
    CHANGES_NOT_ADDED = 2
    CHANGES_ADDED_NOT_COMMITED = 3
