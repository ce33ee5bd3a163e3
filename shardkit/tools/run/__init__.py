"""Jobs: ranks started by torch's elastic agent, their logs, how they fail, go on and stop."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError
from ...tracing.tracer import read_plan


@dataclass(frozen=True)
class RunOptions:
    """Options of ``shardkit run``; its help says what each option is, with its default.

    Attributes:
        program: ``[-m] PROGRAM ARGUMENTS``.
        command: the line that starts it again.
        least: ranks of a machine that it goes on with (``--min-ranks``); None: all.
    """

    program: Sequence[str]
    command: str
    ranks: int
    nodes: tuple[int, int]
    rendezvous: str
    restarts: int
    least: int | None
    id: str
    runs: Path
    join_timeout: int
    trace: str
    grace: float
    stuck_after: float

    def __post_init__(self) -> None:
        least, most = self.nodes
        if not 1 <= least <= most:
            raise ConfigurationError(f"--nodes {least}:{most}: write MIN:MAX with 1 <= MIN <= MAX")
        if self.ranks < 1:
            raise ConfigurationError(f"--ranks {self.ranks}: a machine has at least one")
        if self.least is not None and not 1 <= self.least <= self.ranks:
            raise ConfigurationError(f"--min-ranks {self.least}: between 1 and --ranks, {self.ranks}")
        if self.restarts < 0:
            raise ConfigurationError(f"--restarts {self.restarts}: at least 0")
        if not (self.grace >= 0 and self.stuck_after >= 0):
            raise ConfigurationError(
                f"--grace {self.grace:g} --stuck-after {self.stuck_after:g}: at least 0 seconds"
            )
        if self.least not in (None, self.ranks) and self.restarts < 2:
            raise ConfigurationError(
                "--min-ranks needs --restarts of at least 2: a rank has to fail twice before others go on without it"
            )
        if most > 1 and not self.rendezvous:
            raise ConfigurationError(
                "--nodes above 1 needs --rdzv HOST:PORT, the same everywhere: a machine of the job, and a free port"
            )
        if most > 1 and not self._id():
            raise ConfigurationError(
                "--nodes above 1 needs --id NAME, the same everywhere and new for every job"
            )
        if self.trace:
            read_plan(self.trace, "--trace")
        name = self.program[0] if self.program else ""
        if name != "-m" and not Path(name).is_file():
            raise ConfigurationError(f"there is no program {name!r}; for a module write -m MODULE")

    def _id(self) -> str:
        return self.id or os.environ.get("SLURM_JOB_ID", "")

    @property
    def name(self) -> str:
        return self._id() or time.strftime("%Y%m%d-%H%M%S-") + f"{os.getpid() % 1000:03}"
