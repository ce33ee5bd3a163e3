"""Which run a rank's file of shards is of, and when it was made: files of other runs or moments are not mixed.

Ranks agree on an id once a job and group, in an exchange that they make anyway; what is built after that is counted,
alike on all ranks. So units have ids that other jobs, and other models of the same job, have not, and no file needs a
rank to talk to another.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backend import Group
from ..errors import ConfigurationError
from ..types import StateDict


@dataclass
class _Job:
    """Attributes:
    id: the same on all ranks of a group.
    built: units so far.
    """

    id: str
    built: int = 0


_jobs: weakref.WeakKeyDictionary[Group, _Job] = weakref.WeakKeyDictionary()


def proposed_run_id() -> str:
    """What a rank says where ranks talk anyway; the first rank's is taken. No generator is drawn from."""
    return os.urandom(6).hex()


def new_run_id(group: Group, proposed: str) -> str:
    """The id of the unit that is being built, the same on all ranks.

    Args:
        group: the ranks of the unit.
        proposed: by the first of them; taken for the group's first unit.
    """
    job = _jobs.setdefault(group, _Job(proposed))
    job.built += 1
    return f"{job.id}-{job.built}"


def number_of(group: Group, run_id: str) -> str:
    """What tells a unit from all others of the group in a few characters; those of other jobs, unpickled, take more."""
    job, _, number = run_id.partition("-")
    mine = _jobs.get(group)
    return number if mine is not None and mine.id == job else run_id


def are_several(group: Group) -> bool:
    """Whether more than one unit has been built of a group's ranks."""
    mine = _jobs.get(group)
    return mine is not None and mine.built > 1


def stamp(run_id: str, backwards: int) -> StateDict:
    """What files carry of it.

    Args:
        run_id: of the outermost unit.
        backwards: how many have gone through it, which is the same on all ranks whenever they save.
    """
    return {"run_id": run_id, "backwards": backwards}


def check_one_save(names: Sequence[str], facts: Sequence[Mapping[str, object] | None]) -> None:
    """Refuses shards of several runs, or of several moments of one.

    Args:
        names: of the files, for the message.
        facts: what each holds of :func:`stamp`; those of other libraries have nothing.

    Raises:
        ConfigurationError: they differ; the message names the files.
    """
    by_run: dict[str, list[str]] = {}
    for name, fact in zip(names, facts, strict=True):
        fact = fact or {}
        run = "no run id" if fact.get("run_id") is None else f"run id {fact['run_id']!r}"
        moment = "" if "backwards" not in fact else f" after {fact['backwards']} backwards"
        by_run.setdefault(run + moment, []).append(name)
    if len(by_run) > 1:
        found = "; ".join(f"{', '.join(files)}: {run}" for run, files in by_run.items())
        raise ConfigurationError(
            f"these shards were not saved together, and would make a model that never was: {found}. Leave those of "
            "one save (a save that was killed leaves files of the one before); each job, and each model in it, has an "
            "id of its own, and files without one are another library's"
        )
