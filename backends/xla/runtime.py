"""A rank of a job that torch_xla itself started (a TPU core, or a single device)."""

from __future__ import annotations

from collections.abc import Sequence

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from shardkit.errors import ConfigurationError

from .collectives import NativeCollectives
from .meeting import Call
from .replica import Replica

_RUNTIME = torch_xla._XLAC


class RuntimeHost:
    """Exchange between ranks through the runtime's own rendezvous. Nothing is checked: that would cost a step."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def issued(self, call: Call) -> None:
        pass

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        if self._world_size == 1 or len(ranks) == 1:
            return [payload]
        if len(ranks) != self._world_size:
            raise ConfigurationError(
                f"{what} among ranks {list(ranks)} of {self._world_size}: torch_xla exchanges objects between all "
                "ranks only; use the group of all ranks"
            )
        return list(xm.rendezvous(f"shardkit:{what}:{label}", payload))

    def abort(self) -> None:
        _RUNTIME._clear_pending_irs(_RUNTIME._xla_get_default_device())


def runtime_replica() -> Replica:
    """The calling thread's rank, as the runtime knows it."""
    size = torch_xla.runtime.world_size()
    rank = torch_xla.runtime.global_ordinal() if size > 1 else 0
    return Replica(rank, size, NativeCollectives(), RuntimeHost(size))
