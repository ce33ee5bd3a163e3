"""fairscale.experimental.wgit.utils."""

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.Enum):
    """How the command ended."""

    CLEAN = 0
    FILE_EXISTS_ERROR = 1
    FILE_DOES_NOT_EXIST_ERROR = 2
