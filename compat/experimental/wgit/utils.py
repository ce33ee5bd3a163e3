"""fairscale.experimental.wgit.utils, and the constants of its other modules."""

import enum


class ExitCode(enum.Enum):
    """How the command ended."""

    CLEAN = 0
    FILE_EXISTS_ERROR = 1
    FILE_DOES_NOT_EXIST_ERROR = 2


class RepoStatus(enum.Enum):
    """What has changed since the last commit."""

    CLEAN = 1
    CHANGES_NOT_ADDED = 2
    CHANGES_ADDED_NOT_COMMITED = 3


class Algo(enum.Enum):
    """Transforms of a signal."""

    FFT = 0
    DCT = 1
