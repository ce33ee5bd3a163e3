"""A rank of the XLA backend, and what one has that torch_xla itself started (a TPU core, or a single device).

[Note: exchange among all] torch_xla's programs run on all ranks or on none, so a part of the ranks can't exchange
anything by itself. All ranks exchange at once, each with its own group, and each takes what its group brought. A row
says what the rank is doing and which group it means, so that every rank sees whether all mean the same, and how the
groups divide the ranks: the same error is raised everywhere, or none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from shardkit.backend import Group
from shardkit.errors import ConfigurationError, OutOfStepError

from .collectives import Collectives, Groups, NativeCollectives, replica_groups
from .meeting import ReplicaCall

_FIELDS = struct.Struct("<qiii8s8sH")
_TEXT = 200  # bytes of the call's name that are shown where ranks differ
_SHOWN = 4  # ranks in a message
ROW = 512  # bytes; most payloads fit, so that one collective of one size is all
ROOM = ROW - _FIELDS.size - _TEXT


@dataclass(frozen=True)
class Row:
    """Said first by each rank that exchanges bytes.

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
    """Returns a row of :data:`ROW` bytes. The label is shown, but not compared."""
    text = (f"{what} {label!r}" if label else what).encode()
    fields = _FIELDS.pack(
        len(payload),
        ranks[0],
        len(ranks),
        ranks.index(rank),
        _digest(repr(tuple(ranks)).encode()),
        _digest(what.encode()),
        min(len(text), _TEXT),
    )
    room = payload if len(payload) <= ROOM else b""
    return (fields + text[:_TEXT].ljust(_TEXT, b"\0") + room).ljust(ROW, b"\0")


def read(data: bytes) -> Row:
    """Reads the row of another rank."""
    length, first, size, place, members, call, shown = _FIELDS.unpack_from(data)
    rest = data[_FIELDS.size :]
    text = rest[:shown].decode(errors="replace")
    return Row(length, first, size, place, members, call, text, rest[_TEXT : _TEXT + length])


def partition(rows: Sequence[Row]) -> list[list[int]]:
    """Returns the groups of all ranks, in the order of their smallest members."""
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


_RUNTIME = torch_xla._XLAC


class RuntimeHost:
    """Exchange between ranks by device collectives. Recorded collectives are not checked: that would cost a step.

    See [Note: exchange among all].
    """

    def __init__(self, rank: int, world_size: int, collectives: Collectives) -> None:
        self._rank, self._world_size, self._collectives = rank, world_size, collectives
        self._everyone = list(range(world_size))
        self._parts: dict[tuple[int, ...], Groups] = {}  # how the ranks are divided while this group is used

    def issued(self, call: ReplicaCall) -> None:
        """Notes that a collective was added to the graph."""

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        """Returns each rank's payload, in group order."""
        if len(ranks) == 1:
            return [payload]
        # each sync draws a new one: what a training draws would depend on our exchanges
        seed = xm.get_rng_state()
        try:
            return self._exchange_among_all(ranks, what, label, payload)
        finally:
            xm.set_rng_state(seed)

    def _exchange_among_all(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        torch_xla.sync()  # what is pending runs on its own, so that what follows is the same program each time
        call = ReplicaCall(tuple(self._everyone), what, label)
        mine = written(self._rank, ranks, what, label, payload)
        rows = [read(data) for data in self._gather(mine, ROW, [self._everyone], call)]
        groups = self._parts[tuple(ranks)] = partition(rows)
        longest = max(row.length for row in rows)
        if longest <= ROOM:
            return [rows[rank].payload for rank in ranks]
        # the groups each on their own: what the others exchange would need memory here
        sent = self._gather(payload, room_for(longest), groups, call)
        return [data[: rows[rank].length] for rank, data in zip(ranks, sent, strict=True)]

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> Groups:
        """Returns the groups of all ranks while this one uses ``ranks``; siblings are those that were made beside it.

        Where all ranks have to say so, it is an exchange.
        """
        if len(ranks) == 1:
            return [[rank] for rank in self._everyone]
        if len(ranks) == self._world_size:
            return [list(ranks)]
        if sum(map(len, siblings)) == self._world_size:
            if len({*map(len, siblings)}) > 1:
                raise ConfigurationError(
                    f"ranks are divided into {[list(part) for part in siblings]}: XLA wants parts of one size"
                )
            return replica_groups(ranks, siblings, self._world_size)
        known = tuple(ranks)
        if known not in self._parts:
            self.exchange(ranks, "use of a part of the ranks", "", b"")
        return self._parts[known]

    def abort(self) -> None:
        """Drops what this replica has recorded and not run."""
        _RUNTIME._clear_pending_irs(_RUNTIME._xla_get_default_device())

    def _gather(self, data: bytes, width: int, groups: Groups, call: ReplicaCall) -> list[bytes]:
        """Returns each member's bytes, padded to the width."""
        size = len(groups[0])
        padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        self.issued(call)
        rows = self._collectives.all_gather(padded.to(torch_xla.device()), groups, size)
        torch_xla.sync()  # a read alone would run what rows depend on, and leave what orders collectives to run again
        whole = rows.cpu().numpy().tobytes()
        return [whole[start : start + width] for start in range(0, size * width, width)]


@dataclass(frozen=True)
class Replica:
    """One rank of the job: its global rank, and its ways to the others."""

    rank: int
    world_size: int
    collectives: Collectives
    host: RuntimeHost
    root: list[Group] = field(default_factory=list)  # the group of all ranks, once it was asked for
    # Those of torch.distributed, by ranks: thousands of ranks are not to be listed again for each unit of a model.
    parts: dict[tuple[int, ...], Group] = field(default_factory=dict)


def runtime_replica() -> Replica:
    """Returns the calling thread's rank, as the runtime knows it."""
    size = torch_xla.runtime.world_size()
    rank = torch_xla.runtime.global_ordinal() if size > 1 else 0
    collectives = NativeCollectives()
    return Replica(rank, size, collectives, RuntimeHost(rank, size, collectives))
