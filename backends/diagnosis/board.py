"""What the ranks of a group publish for each other, in the job's key-value store."""

from __future__ import annotations

import contextlib
import functools
import json

from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.types import StateDict

from ..torch_types import Store
from .store_thread import STORE_THREAD, NoAnswer

_ANSWERS = 5.0  # seconds in which the store answers
_QUESTIONS = "called"


class Board:
    """Entries by key. Once the store's server is gone it is empty and takes nothing: the collective itself fails next.

    Args:
        store: None for a group of one rank, whose board is closed.
    """

    def __init__(self, store: Store | None, name: str) -> None:
        self._store = PrefixStore(f"shardkit/{name}", store) if store is not None else None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def close(self) -> None:
        """The store is let go, and with it the port of its server."""
        self._store = None

    def publish(self, key: str, entry: StateDict) -> None:
        if self._store is None:
            return
        try:
            with contextlib.suppress(NoAnswer):
                STORE_THREAD.ask(functools.partial(self._store.set, key, json.dumps(entry)), _ANSWERS)
        except (RuntimeError, ValueError):
            self._store = None

    def read(self, key: str) -> StateDict | None:
        """None where nothing is known."""
        store = self._store
        if store is None:
            return None
        try:
            text = STORE_THREAD.ask(lambda: store.get(key) if store.check([key]) else "{}", _ANSWERS)
            return json.loads(text) or None
        except NoAnswer:
            return None
        except (RuntimeError, ValueError):
            self._store = None
            return None

    def ask(self) -> int:
        """All ranks' witnesses say where their ranks stand, for some seconds; the number of this question."""
        if self._store is None:
            return 0
        try:
            return int(STORE_THREAD.ask(functools.partial(self._store.add, _QUESTIONS, 1), _ANSWERS))
        except NoAnswer:
            return 0
        except (RuntimeError, ValueError):
            self._store = None
            return 0

    def asked(self) -> int:
        """How many questions there were.

        Raises:
            NoAnswer, RuntimeError: the store does not say.
        """
        store = self._store
        if store is None:
            return 0
        return STORE_THREAD.ask(
            lambda: int(store.add(_QUESTIONS, 0)) if store.check([_QUESTIONS]) else 0, _ANSWERS
        )
