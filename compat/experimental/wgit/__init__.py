"""fairscale.experimental.wgit: version control for weights, an experiment that was never finished."""

import enum


class ExitCode(enum.Enum):
    CLEAN = 0
    FILE_EXISTS_ERROR = 1
    FILE_DOES_NOT_EXIST_ERROR = 2


class RepoStatus(enum.Enum):
    """Tells what has changed since the last commit."""

    CLEAN = 1
    CHANGES_NOT_ADDED = 2
    CHANGES_ADDED_NOT_COMMITED = 3


class Algo(enum.Enum):
    FFT = 0
    DCT = 1


__version_tuple__ = (0, 0, 1)
