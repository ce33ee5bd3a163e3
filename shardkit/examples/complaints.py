"""What a script prints in place of a traceback where its user has something to change."""

from __future__ import annotations

from shardkit.errors import BackendError, ConfigurationError, DamagedFileError, RankFailedError, ShardkitError

_KINDS = (ConfigurationError, BackendError, DamagedFileError)


def complaint(error: ShardkitError) -> str:
    """The message of an error about arguments, data or the machine, from wherever it was raised; "" for all others."""
    if not isinstance(error, RankFailedError):
        return str(error) if isinstance(error, _KINDS) else ""
    if error.remote_type not in {kind.__name__ for kind in _KINDS}:
        return ""
    # the last of them: a worker's error stands in that of the rank which it loads images for
    _, _, message = error.remote_traceback.rpartition(
        f"{ConfigurationError.__module__}.{error.remote_type}: "
    )
    return message.strip()
