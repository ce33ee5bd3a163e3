"""A work of torch's: this rank's part of collectives of simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from .group import SimulatedWork


class TorchWork(dist.Work):
    """See above. Waiting gives the other ranks their turn.

    Args:
        parts: what to wait for.
        outputs: the result.
        source: who has sent it, for a receive.
    """

    def __init__(
        self, parts: Sequence[SimulatedWork], outputs: Sequence[torch.Tensor], source: Callable[[], int] = lambda: -1
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts, self._outputs, self._source = list(parts), list(outputs), source

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self.parts:
            part.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(part.is_done() for part in self.parts)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._source()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that is done: what waits for one in C++ would not let other ranks have their turn."""
        self.wait()
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._outputs)
        return future
