"""A rank of the XLA backend, and what one has that torch_xla itself started (a TPU core, or a single device)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from shardkit.backend import Group
from shardkit.errors import ConfigurationError

from . import exchange
from .collectives import Collectives, Groups, NativeCollectives, replica_groups
from .meeting import Call

_RUNTIME = torch_xla._XLAC


class RuntimeHost:
    """Exchange between ranks by device collectives. Recorded collectives are not checked: that would cost a step.

    See [Note: exchange among all].
    """

    def __init__(self, rank: int, world_size: int, collectives: Collectives) -> None:
        self._rank, self._world_size, self._collectives = rank, world_size, collectives
        self._everyone = list(range(world_size))
        self._parts: dict[tuple[int, ...], Groups] = {}  # how the ranks are divided while this group is used

    def issued(self, call: Call) -> None:
        """A collective was added to the graph."""

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        """Each rank's payload, in group order."""
        if len(ranks) == 1:
            return [payload]
        seed = (
            xm.get_rng_state()
        )  # each sync draws a new one: what a training draws would depend on our exchanges
        try:
            return self._exchange_among_all(ranks, what, label, payload)
        finally:
            xm.set_rng_state(seed)

    def _exchange_among_all(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        torch_xla.sync()  # what is pending runs on its own, so that what follows is the same program each time
        call = Call(tuple(self._everyone), what, label)
        mine = exchange.written(self._rank, ranks, what, label, payload)
        rows = [exchange.read(data) for data in self._gather(mine, exchange.ROW, [self._everyone], call)]
        groups = self._parts[tuple(ranks)] = exchange.partition(rows)
        longest = max(row.length for row in rows)
        if longest <= exchange.ROOM:
            return [rows[rank].payload for rank in ranks]
        # the groups each on their own: what the others exchange would need memory here
        sent = self._gather(payload, exchange.room_for(longest), groups, call)
        return [data[: rows[rank].length] for rank, data in zip(ranks, sent, strict=True)]

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> Groups:
        """The groups of all ranks while this one uses ``ranks``; siblings are those that were made beside it.

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

    def _gather(self, data: bytes, width: int, groups: Groups, call: Call) -> list[bytes]:
        """Each member's bytes, padded to the width."""
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
    """The calling thread's rank, as the runtime knows it."""
    size = torch_xla.runtime.world_size()
    rank = torch_xla.runtime.global_ordinal() if size > 1 else 0
    collectives = NativeCollectives()
    return Replica(rank, size, collectives, RuntimeHost(rank, size, collectives))
