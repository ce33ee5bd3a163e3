"""Shards on the host, in full precision, with a copy on the device in the dtype that is computed in.

Legend: S shard numel, P bytes of a rank's shards in that dtype.

So the optimizer runs on the host, where its state is too, and nothing that is read there differs from what it is
without a copy: gradients, clipping, state dicts. What differs is what crosses the bus, and when.

- *Up.* Gathers read the copy. It is renewed after each step of an optimizer, P bytes, unit by unit in the order of
  forward; a unit's gather waits for its own part. Any other change of a shard is noticed by its version, in front of
  the next gather. Values are cast on the host, into pinned memory that nobody else writes to: what is on its way stays
  what it was, whatever the program does to the shards meanwhile.
- *Down.* A reduced gradient is copied as it has travelled between ranks, P bytes a backward, while backward goes on.
  The host waits for it at the end of backward, and casts it there.

[Note: steps in backward] Between backward and step a program may read and change all gradients: clip them, unscale
them, skip the step. So at the end of backward the host waits for all of them, and the device has nothing to do while
the optimizer runs. With :func:`~shardkit.step_in_backward` a program says that it does nothing of that. At the end of
backward, where the device still computes what the host has long issued, the host then takes one unit after the other:
it waits for its gradient, runs the optimizer over it, and sends the new values up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch

from ..backend import DONE, Backend, Copy
from .store import Stored

if TYPE_CHECKING:
    from .flat_param import FlatParam

_holders_of = torch._C._storage_Use_Count  # how many tensors look at a storage
_one = torch.empty(1)
_ALONE = _holders_of(_one.untyped_storage()._cdata)


class Landing:
    """Brings gradients of one shard from the device to the host.

    Attributes:
        is_idle: a gradient has come since the copy was read: the device, too, is through with it.
        then: called when a backward has brought its gradient.
    """

    def __init__(self, backend: Backend, size: int, dtype: torch.dtype) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._memory: dict[torch.dtype, torch.Tensor] = {}  # pinned
        self._arriving: list[tuple[torch.Tensor, Copy, list[bool], bool]] = []
        self.is_idle = False
        self.then: Callable[[], None] | None = None

    def start(self, gradient: torch.Tensor, had: list[bool], had_all: bool) -> None:
        """Copies a gradient of the device, [S], beside what is computed; notes who had it, and whether all had."""
        memory = self._unused(gradient.dtype)
        self._arriving.append((memory, self._backend.copy_down(memory, gradient), had, had_all))

    def taken(self) -> list[tuple[torch.Tensor, Copy, list[bool], bool]]:
        """Takes what :meth:`start` has begun: where to, what to wait for, and what was noted."""
        arriving, self._arriving = self._arriving, []
        return arriving

    def finish(self, memory: torch.Tensor, work: Copy) -> torch.Tensor:
        """Waits for one of these; returns it in the shard's dtype, [S]."""
        work.wait_on_host()
        return memory if memory.dtype == self._dtype else self._unused(self._dtype).copy_(memory)

    def landed(self, waited: bool) -> None:
        """Notes that the shard has its gradient; whether the host has ``waited`` for it."""
        self.is_idle = self.is_idle or waited
        if self.then is not None:
            self.then()

    def _unused(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [S] that nobody else looks at: that of the last step, unless its gradients are still there."""
        kept = self._memory.get(dtype)
        if kept is None or _holders_of(kept.untyped_storage()._cdata) > _ALONE:
            kept = self._memory[dtype] = self._backend.pinned(self._size, dtype)
        return kept.view(-1)


@final
class Mirrored(Stored):
    """Gathers from a copy of the shard.

    Attributes:
        copy: on the device, [S].
    """

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self.landing: Landing = Landing(self._backend, flat.layout.shard_numel, flat.param.dtype)
        size = flat.layout.shard_numel
        self.copy = torch.empty(size, dtype=self._dtype, device=self._device)
        self._staged = self._backend.pinned(size, self._dtype)
        self._work: Copy = DONE

    def _now(self) -> tuple[int, int]:
        return self._flat.version, self._flat.param.data_ptr()

    @torch.no_grad()
    def renew(self, always: bool = True) -> None:
        """Copies the shard to the device, beside what is computed; where it has another version, or ``always``."""
        if not always and self.copied == self._now():
            return
        if not self._work.is_done():  # nothing has been computed with what came up last
            self._work.wait_on_host()
        self._work.wait()
        self._staged.copy_(self._flat.param.data.view(-1))
        self._work = self._backend.copy_up(self.copy, self._staged, at_once=self.landing.is_idle)
        self.copied = self._now()

    def sent(self) -> torch.Tensor:
        self.renew(always=False)
        self._work.wait()
        self.landing.is_idle = False
        return self.copy
