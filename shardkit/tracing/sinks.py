"""Where metrics go."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from ..errors import ConfigurationError
from ..types import Framework

Record = dict[str, float | int]


class JsonLines:
    """Appends records to a file, each a line of JSON; what is no finite number is a string ("nan").

    Args:
        rank: becomes a part of the name.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        path = Path(path)
        if rank is not None:
            path = path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """A line, which is there when this returns."""
        shown = {k: v if math.isfinite(v) else str(v) for k, v in record.items()}
        self._file.write(json.dumps(shown) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Writes event files of TensorBoard's.

    Args:
        folder: of this run.

    Raises:
        ConfigurationError: tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "metrics for TensorBoard need tensorboard: pip install tensorboard"
            ) from error
        self._open = lambda: SummaryWriter(os.fspath(folder))  # type: ignore[no-untyped-call]
        self._writer: Framework = None

    def write(self, record: Record) -> None:
        """One scalar for each number."""
        if self._writer is None:  # on the rank that writes
            self._writer = self._open()
        for name, value in record.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, int(record["step"]), walltime=record["time"])
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs to Weights & Biases.

    Args:
        run: what ``wandb.init()`` returned, on the rank that writes; None: the run that is active at the first record,
            or one that ``wandb.init(**options)`` begins.

    Raises:
        ConfigurationError: wandb is missing.
    """

    def __init__(self, run: Framework = None, **options: object) -> None:
        self._run, self._options, self._is_own = run, options, False
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ConfigurationError(
                    "metrics for Weights & Biases need wandb: pip install wandb"
                ) from error
            self._wandb: Framework = wandb

    def write(self, record: Record) -> None:
        """One log of all numbers."""
        if self._run is None:
            self._is_own = self._wandb.run is None
            self._run = self._wandb.run or self._wandb.init(**self._options)
        self._run.log(
            {k: v for k, v in record.items() if k not in ("step", "time")}, step=int(record["step"])
        )

    def close(self) -> None:
        """Ends the run if it was begun here."""
        if self._is_own and self._run is not None:
            self._run.finish()
