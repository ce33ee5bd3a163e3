"""One rank of many that don't exist: its collectives carry nothing, and what they would send is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from shardkit.backend import DONE, ReduceOp, Work
from shardkit.backends.c10d.group import PIECE
from shardkit.backends.c10d.payloads import ReduceScatterPlan
from shardkit.backends.imagined import ImaginedBackend, ImaginedGroup

from .tape import Tape

Resized = Callable[[torch.Tensor], None]


class Arriving(Work):
    """A reduction that holds memory until somebody waits for it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._memory = None


class CountingGroup(ImaginedGroup):
    """See above.

    Attributes:
        collectives: name -> number since :meth:`reset`.
        sent: bytes that a rank has to send for them, averaged over ranks.
        tape: records them, if there is one.
    """

    def __init__(self, backend: CountingBackend, world_size: int, rank: int, on_host: bool) -> None:
        super().__init__(backend, range(world_size))
        self.rank, self._on_host = rank, on_host
        self.tape: Tape | None = None
        self.reset()

    def reset(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def _reduce_scatter(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        parts: list[int],
        op: ReduceOp,
        async_op: bool,
        label: str,
    ) -> Work:
        work = self._carry("reduce_scatter", input, async_op, label)
        if not self._on_host or self.world_size == 1:
            return work
        # gloo has no reduce-scatter of its own: what arrives may lie beside what it is added to
        exchange = ReduceScatterPlan(self.rank, tuple(parts))
        arrived = 0 if self.world_size == 2 else exchange.own * self.world_size  # two add where it arrives
        return Arriving(shard.new_empty(min(exchange.own, PIECE) if exchange.in_rounds else arrived))

    def _carry(self, operation: str, tensor: torch.Tensor, async_op: bool, label: str) -> Work:
        twice = 2 if operation == "all_reduce" else 1
        self.collectives[operation] += 1
        nbytes = tensor.numel() * tensor.element_size()
        self.sent += twice * nbytes * (self.world_size - 1) / self.world_size
        work = DONE if self.tape is None else self.tape.collective(operation, nbytes, label)
        if not async_op:
            work.wait()
        return work


class CountingBackend(ImaginedBackend):
    """Serves meta tensors.

    Args:
        world_size: W.
        rank: which of them this is.
        resized: is told of tensors whose memory was taken or given back; None: nobody is.
        on_host: ranks are processes on CPUs, over gloo; else on devices.
    """

    name = "counting"

    def __init__(
        self, world_size: int, rank: int = 0, resized: Resized | None = None, on_host: bool = False
    ) -> None:
        self.counted = self._group = CountingGroup(self, world_size, rank, on_host)
        self._resized = resized

    def device(self) -> torch.device:
        """Where what ranks tell each other is made: it has values, which no other rank changes."""
        return torch.device("cpu")

    def take_storage(self, tensor: torch.Tensor) -> None:
        super().take_storage(tensor)
        self._note(tensor)

    def release_storage(self, tensor: torch.Tensor) -> None:
        super().release_storage(tensor)
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        if self._resized is not None:
            self._resized(tensor)
