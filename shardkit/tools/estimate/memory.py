"""How many bytes are in tensors after each operation, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ...torch_seams.live_memory import LiveTensors
from ...types import Args, Kwargs, Tree
from .tape import Tape

KINDS = ("parameters", "gathered", "gradients", "optimizer state", "activations")
Kinds = Mapping[str, Iterable[torch.Tensor]]


class MemoryWatch(LiveTensors):
    """Counts what operations inside of it use, and looks at it after some of them.

    Args:
        kinds: tells which tensors are of which kind, but activations, which is everything else.
        moments: after which operations to look at the kinds, in order.
        tape: records the operations.

    Attributes:
        peak_at: the number of the operation after which most was alive.
        seen: what :attr:`moments` showed: bytes by kind.
    """

    def __init__(
        self, kinds: Callable[[], Kinds], moments: Iterable[int] = (), tape: Tape | None = None
    ) -> None:
        super().__init__()
        self._tape = tape
        self._kinds, self._moments = kinds, iter(moments)
        self._next = next(self._moments, -1)
        self.operations = 0
        self.peak_at = -1
        self.seen: list[dict[str, int]] = []

    def grown(self) -> None:
        """Nothing: what is alive within an operation does not count."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Tree:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._tape is not None:
            self._tape.operation(func, args, kwargs or {}, result)
        if self.bytes > self.peak:
            self.peak, self.peak_at = self.bytes, self.operations
        if self.operations == self._next:
            self._next = next(self._moments, -1)
            self.seen.append(self.by_kind())
        self.operations += 1
        return result

    def by_kind(self) -> dict[str, int]:
        """Bytes now."""
        found, counted = dict.fromkeys(KINDS, 0), set()
        for kind, tensors in self._kinds().items():
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._sizes and key not in counted:
                    counted.add(key)
                    found[kind] += self._sizes[key]
        found["activations"] = self.bytes - sum(found.values())
        return found
