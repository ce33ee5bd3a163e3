"""Tensors in the form in which a library takes them, and what a rank does by itself around what gloo carries.

Legend: W world size, S one rank's shard numel.
"""

from __future__ import annotations

import torch

from shardkit.backend import ReduceOp

NUMBERS = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
    }
)
"""Dtypes that every library knows; everything else (int16, unsigned 16 to 64 bits, float8, complex numbers) travels as
bytes."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, [2 * numel], in the same memory: no library knows complex numbers."""
    return torch.view_as_real(tensor.detach()).view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor as its bytes, [numel * itemsize]."""
    return tensor.detach().view(-1).view(torch.uint8)


# Elements that would arrive at once in a reduce-scatter; above, ranks exchange in rounds.
ROUNDS_ABOVE = 2**18


class ReduceScatterPlan:
    """Says how the parts of a reduce-scatter travel, for one set of sizes.

    Attributes:
        in_rounds: whether what arrives is too much to hold at once.
        partners: in each round, the rank to send to and the one to receive from.
    """

    __slots__ = ("in_rounds", "largest", "numel", "own", "partners", "receive", "send", "sizes")

    def __init__(self, rank: int, sizes: tuple[int, ...]) -> None:
        self.own = sizes[rank]
        self.numel = sum(sizes)
        self.sizes = list(sizes)
        self.send = list(sizes)
        self.receive = [self.own] * len(sizes)
        world_size = len(sizes)
        if world_size == 2:
            self.send[rank] = self.receive[rank] = 0
        self.largest = max(sizes)
        self.in_rounds = world_size > 2 and world_size * self.largest > ROUNDS_ABOVE
        self.partners = [((rank + d) % world_size, (rank - d) % world_size) for d in range(1, world_size)]


class Accumulate:
    """Adds up what arrived, in rank order.

    Args:
        shard: the result, [S].
        local: this rank's own part where it did not travel, [S].
        received: the parts that arrived, [W * S] or, with ``local``, [S]; this may be ``shard``.
    """

    __slots__ = ("_local", "_op", "_received", "_shard", "_world_size")

    def __init__(
        self,
        shard: torch.Tensor,
        local: torch.Tensor | None,
        received: torch.Tensor,
        op: ReduceOp,
        world_size: int,
    ) -> None:
        self._shard, self._local, self._received = shard, local, received
        self._op, self._world_size = op, world_size

    def __call__(self) -> None:
        shard, op = self._shard, self._op
        if not shard.numel():
            return
        if self._local is None:
            parts = self._received.view(self._world_size, shard.numel())
            if op is ReduceOp.MAX or op is ReduceOp.MIN:
                torch.amax(parts, 0, out=shard) if op is ReduceOp.MAX else torch.amin(parts, 0, out=shard)
                return
            torch.sum(parts, 0, dtype=shard.dtype, out=shard)
        elif op is ReduceOp.MAX:
            torch.maximum(self._local, self._received, out=shard)
        elif op is ReduceOp.MIN:
            torch.minimum(self._local, self._received, out=shard)
        else:
            torch.add(self._local, self._received, out=shard)
        if op is ReduceOp.AVG:
            shard.div_(self._world_size)


class Finish:
    """Divides an average, and copies back where the tensor could not travel as it is."""

    __slots__ = ("_divisor", "_tensor", "_wire")

    def __init__(self, tensor: torch.Tensor, wire: torch.Tensor, divisor: int) -> None:
        self._tensor, self._wire, self._divisor = tensor, wire, divisor

    def __call__(self) -> None:
        with torch.no_grad():
            if self._divisor > 1:
                self._wire.div_(self._divisor)
            if self._wire is not self._tensor:
                self._tensor.copy_(self._wire)
