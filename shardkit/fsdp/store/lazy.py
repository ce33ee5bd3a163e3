"""Values where a compiler decides when they exist: there is no memory to take or to give back.

Legend: W world size, S shard numel.

[Note: one gather a unit] All collectives of a program are in one order, so that each is needed by the next, and the
compiler drops none: a bias that backward never reads would be gathered again, too. So what a unit asks for at a time
travels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ..originals import FlatParamLike, ReleasedParameter
from .base import Gather, Store
from .states import GATHERING, RELEASED, State


@final
class Lazy(Store):
    """Original parameters get new values with each gathering, and an empty one afterwards.

    What nobody refers to, the compiler frees; see ``fsdp/lazy.py``.
    """

    keeps_shapes = False

    def __init__(self, flat: FlatParamLike) -> None:
        super().__init__(flat)
        self._full: torch.Tensor | None = None  # [W * S]
        self._after: Sequence[torch.Tensor] | None = None  # of a gather that was asked for and not issued
        # one for good: each new one would be computed in each step
        self._nothing = torch.empty(0, dtype=self._dtype).to(self._device)

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data if self._full is None else self._full

    def attach(self) -> None:
        self._reveal()
        self._free(False)

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        """Asks for values, once ``after`` is computed: :func:`gather_together` issues it, or :meth:`finish`."""
        self._after = after
        self.state = GATHERING

    def finish(self) -> None:
        gather_together([self])
        super().finish()

    def _arrive(self, values: torch.Tensor) -> None:
        self._full = values
        self._reveal()
        self.show(values)

    def _free(self, keep: bool) -> State:
        self._full = None
        self._conceal()
        for original in self._originals:
            original.param.__class__ = original.kind  # a released one can't be changed
            original.param.data = self._nothing
            original.param.__class__ = ReleasedParameter
        return RELEASED


def gather_together(stores: Sequence[Store]) -> None:
    """Issues what these were asked for: one collective for each group and dtype."""
    alike: dict[object, list[Lazy]] = {}
    for store in stores:
        if isinstance(store, Lazy) and store._after is not None:
            flat = store._flat
            alone = None if flat.hears is None else flat
            key = flat.group, flat.param.dtype, flat.param.device, store._dtype, store._device, alone
            alike.setdefault(key, []).append(store)
    for together in alike.values():
        _gather(together)


def _gather(stores: Sequence[Lazy]) -> None:
    first, flat = stores[0], stores[0]._flat
    shards = [store._flat.param.data.view(-1) for store in stores]
    sent = torch.cat(shards) if len(shards) > 1 else shards[0].clone()  # a value of its own: tying changes it
    first._backend.tie([sent, *(first._after or ())])
    sent = sent.to(device=first._device, dtype=first._dtype)
    world_size = flat.group.world_size
    full = sent.new_empty(world_size * sent.numel())  # [W * sum of S]
    label = flat.label if len(stores) == 1 else f"parameters of {flat.path or 'the root'}"
    work = first._channel.all_gather_into(full, sent, async_op=True, label=label)
    parts = [full]
    if len(stores) > 1:
        sizes = [shard.numel() for shard in shards]
        parts = [part.reshape(-1) for part in full.view(world_size, -1).split(sizes, dim=1)]
    for store, part in zip(stores, parts, strict=True):
        store._after = None
        store.in_flight = Gather(work, part)  # [W * S]
