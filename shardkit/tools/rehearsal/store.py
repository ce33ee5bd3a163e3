"""The key-value store that ranks of a rehearsal find where processes find that of their job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from shardkit.backends.diagnosis.calls import Call
from shardkit.backends.simulated.rank_threads import Condition, RankThreads
from shardkit.errors import ConfigurationError
from shardkit.types import Tree

from .ranks import current

Value = bytes | str
_Base: Tree = vars(dist)["Store"]  # mypy does not find it under its name


class SharedStore(_Base):  # type: ignore[misc]
    """One for all ranks; who waits for a key gives the others their turn.

    Methods have torch's names, and those by which its C++ calls them.
    """

    def __init__(self, threads: RankThreads) -> None:
        super().__init__()
        self._threads, self._values = threads, dict[str, bytes]()

    def set(self, key: str, value: Value) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number

    def append(self, key: str, value: Value) -> None:
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        now = self._values.get(key)
        if (now is None and not expected) or now == _bytes(expected):
            self._values[key] = _bytes(desired)
        return self._values.get(key, _bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when another rank has set them all."""
        wanted = list(keys)
        if self.check(wanted):
            return
        rank = current()
        if rank is None:
            raise ConfigurationError(
                f"a thread that is no simulated rank waits for {wanted} in a rehearsal's store"
            )
        call = Call("store", 0, f"wait for {wanted}", 0, "")
        self._threads.wait(rank.number, Condition(lambda: self.check(wanted)), call)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys


def _bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
