"""A process that loads samples, and who it is for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import BaseContext


class Worker:
    """Called in each worker as it begins.

    [Note: orphans] torch's workers end when their parent is another one than in the beginning. Of a rank that was
    killed while its workers started they would load samples for ever, and hold on to its memory and its terminal.

    Args:
        begin: the user's ``worker_init_fn``.
        context: how workers are started, as a DataLoader takes it.
    """

    def __init__(self, begin: Callable[[int], object] | None, context: str | BaseContext | None) -> None:
        self._begin = begin
        name = context.get_start_method() if isinstance(context, BaseContext) else context
        self._is_child = (name or multiprocessing.get_start_method()) != "forkserver"

    def __call__(self, number: int) -> None:
        parent = multiprocessing.parent_process()
        if self._is_child and parent is not None and os.getppid() != parent.pid:
            os._exit(0)  # see [Note: orphans]
        if self._begin is not None:
            self._begin(number)
