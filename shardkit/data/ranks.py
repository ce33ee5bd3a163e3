"""Which of how many ranks loads data here."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Backend, backend_of_job
from ..errors import ConfigurationError
from ..launching.started import started_rank


class RankOfJob(NamedTuple):
    """Rank r of W."""

    rank: int
    world_size: int


def rank_of_job(
    rank: int | None = None, world_size: int | None = None, backend: str | Backend | None = None
) -> RankOfJob:
    """What is given, and for what is not the calling rank's; a process that is on its own is rank 0 of 1.

    Raises:
        ConfigurationError: ``rank`` is not below ``world_size``; or this process was started as one of several ranks,
            and they have not met yet.
    """
    if rank is None or world_size is None:
        found = _here(backend)
        rank = found.rank if rank is None else rank
        world_size = found.world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} of {world_size} ranks does not exist; pass 0 to {world_size - 1}"
        )
    return RankOfJob(rank, world_size)


def _here(backend: str | Backend | None) -> RankOfJob:
    try:
        group = backend_of_job(backend).group()
    except ConfigurationError:
        if started_rank() is not None or backend is not None:
            raise  # alone, each would load everything
        return RankOfJob(0, 1)
    return RankOfJob(group.rank, group.world_size)
