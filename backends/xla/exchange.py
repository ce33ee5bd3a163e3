"""Bytes between ranks that have nothing but device collectives: the rows that travel, and what they say.

[Note: exchange among all] torch_xla's programs run on all ranks or on none, so a part of the ranks can't exchange
anything by itself. All ranks exchange at once, each with its own group, and each takes what its group brought. A row
says what the rank is doing and which group it means, so that every rank sees whether all mean the same, and how the
groups divide the ranks: the same error is raised everywhere, or none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.errors import ConfigurationError, OutOfStepError

_FIELDS = struct.Struct("<qiii8s8sH")
_TEXT = 200  # bytes of the call's name that are shown where ranks differ
_SHOWN = 4  # ranks in a message
ROW = 512  # bytes; most payloads fit, so that one collective of one size is all
ROOM = ROW - _FIELDS.size - _TEXT


@dataclass(frozen=True)
class Row:
    """What a rank says first.

    Attributes:
        length: of its payload.
        first, size, place: global rank of its group's first member, number of members, its own place.
        members: digest of the group's ranks.
        call: digest of what it does; ``text`` is how that begins.
        payload: if it has room here.
    """

    length: int
    first: int
    size: int
    place: int
    members: bytes
    call: bytes
    text: str
    payload: bytes


def written(rank: int, ranks: Sequence[int], what: str, label: str, payload: bytes) -> bytes:
    """A row of :data:`ROW` bytes. The label is shown, but not compared."""
    text = (f"{what} {label!r}" if label else what).encode()
    fields = _FIELDS.pack(
        len(payload), ranks[0], len(ranks), ranks.index(rank), _digest(repr(tuple(ranks)).encode()),
        _digest(what.encode()),
        min(len(text), _TEXT),
    )  # fmt: skip
    room = payload if len(payload) <= ROOM else b""
    return (fields + text[:_TEXT].ljust(_TEXT, b"\0") + room).ljust(ROW, b"\0")


def read(data: bytes) -> Row:
    """What another rank has written."""
    length, first, size, place, members, call, shown = _FIELDS.unpack_from(data)
    rest = data[_FIELDS.size :]
    text = rest[:shown].decode(errors="replace")
    return Row(length, first, size, place, members, call, text, rest[_TEXT : _TEXT + length])


def partition(rows: Sequence[Row]) -> list[list[int]]:
    """The groups of all ranks, in the order of their smallest members.

    Raises:
        OutOfStepError: they do different things, or their groups don't divide the ranks.
        ConfigurationError: the groups are not of one size.
    """
    if len({row.call for row in rows}) > 1:
        raise OutOfStepError(_differ("ranks are out of step; all must exchange at the same point:", rows))
    groups: dict[int, list[int]] = {}
    for rank, row in sorted(enumerate(rows), key=lambda pair: pair[1].place):
        groups.setdefault(row.first, []).append(rank)
    for first, ranks in groups.items():
        mine = {(rows[r].size, rows[r].members) for r in ranks}
        if (
            len(mine) > 1
            or rows[first].size != len(ranks)
            or [rows[r].place for r in ranks] != [*range(len(ranks))]
        ):
            raise OutOfStepError(
                _differ(
                    f"{rows[first].text} among a part of the ranks: on a TPU all ranks exchange at once, each with the "
                    "group it is in, but these don't divide the ranks:",
                    rows,
                )
            )
    if len({len(ranks) for ranks in groups.values()}) > 1:
        raise ConfigurationError(
            _differ(f"{rows[0].text} among parts of different sizes; XLA wants parts of one size:", rows)
        )
    return sorted(groups.values(), key=min)


def _differ(begin: str, rows: Sequence[Row]) -> str:
    """One rank of each kind."""
    kinds: dict[tuple[object, ...], int] = {}
    for rank, row in enumerate(rows):
        kinds.setdefault((row.call, row.members), rank)
    lines = [
        f"  rank {rank}: {rows[rank].text} in its group of {rows[rank].size}, whose first is rank {rows[rank].first}"
        for rank in [*kinds.values()][:_SHOWN]
    ]
    more = [f"  and {len(kinds) - _SHOWN} more"] if len(kinds) > _SHOWN else []
    return "\n".join([begin, *lines, *more])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def room_for(length: int) -> int:
    """Bytes that travel for a payload: a power of two, so that few sizes are compiled."""
    return 1 << max(length - 1, ROW).bit_length()
