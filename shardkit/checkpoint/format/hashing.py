"""Checksums of what checkpoints consist of: xxhash's where it is installed, else of Python's own library."""

from __future__ import annotations

import hashlib
import importlib.util
from typing import Protocol

from ...errors import ConfigurationError

XXH3 = "xxh3_64"
SHA256 = "sha256"


class Hasher(Protocol):
    """What both libraries' objects have."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def best_hash() -> str:
    """The quickest one that this environment has; the slower one is in every Python."""
    return XXH3 if importlib.util.find_spec("xxhash") is not None else SHA256


def new_hasher(name: str) -> Hasher:
    """A hash that has seen nothing yet.

    Raises:
        ConfigurationError: the name is of none, or xxhash is not installed.
    """
    if name == SHA256:
        return hashlib.sha256()
    if name != XXH3:
        raise ConfigurationError(
            f"checksums of kind {name!r} are unknown here; known are {XXH3} and {SHA256}"
        )
    try:
        import xxhash
    except ImportError:
        raise ConfigurationError(
            "the checksums of this checkpoint are xxhash's, which is not installed: pip install xxhash, "
            "or read without comparing them (verify=False)"
        ) from None
    hasher: Hasher = xxhash.xxh3_64()
    return hasher


def hash_of(data: bytes | bytearray | memoryview, name: str) -> str:
    """Of bytes that are in memory, in hexadecimal digits."""
    hasher = new_hasher(name)
    hasher.update(data)
    return hasher.hexdigest()
