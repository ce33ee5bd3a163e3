"""Where ranks' output goes, for torch's agent: files of the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from ...launching.run_folder import steps_of
from .rank import FILES, PIPE

Signs = list[tuple[object, ...]]


class RankLogs(LogsSpecs):
    """Files of each rank.

    Attributes:
        attempt: its folder, and its number; the agent sets them before it starts ranks.
        pipes: folder of the pipes through which ranks are asked where they stand.
    """

    def __init__(self, run: Path, pipes: Path) -> None:
        super().__init__(str(run))
        self._run, self.pipes = run, pipes
        self.attempt, self.number = run, 0

    @property
    def root_log_dir(self) -> str:
        return str(self._run)

    def files(self, rank: int | str) -> Path:
        """Path of a rank's files, without their endings."""
        return self.attempt / f"rank{rank}"

    def pipe(self, rank: int | str) -> Path:
        return self.pipes / f"{self.number}-{rank}"

    def signs(self, rank: int) -> tuple[object, ...]:
        """What a rank that lives changes: steps of an optimizer, and what it has printed."""
        files = [Path(f"{self.files(rank)}.{ending}") for ending in ("steps", "out", "err")]
        return steps_of(files[0]), *(file.stat().st_size if file.exists() else -1 for file in files)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent: the files, and what ranks find in their environment."""
        to = LogsDest()
        for local_rank, variables in envs.items():
            files, pipe = self.files(variables["RANK"]), self.pipe(variables["RANK"])
            os.mkfifo(pipe)
            to.stdouts[local_rank], to.stderrs[local_rank] = f"{files}.out", f"{files}.err"
            to.error_files[local_rank] = f"{files}.error.json"
            variables["TORCHELASTIC_ERROR_FILE"] = to.error_files[local_rank]
            # Each agent counts for itself, and not every new round: ranks have to find the same number.
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self.number)
            variables[FILES], variables[PIPE] = str(files), str(pipe)
        return to
