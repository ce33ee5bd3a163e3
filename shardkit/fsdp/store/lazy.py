"""Values where a compiler decides when they exist: there is no memory to take or to give back.

Legend: W world size, S shard numel.
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
        # one for good: each new one would be computed in each step
        self._nothing = torch.empty(0, dtype=self._dtype).to(self._device)

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data if self._full is None else self._full

    def attach(self) -> None:
        self._reveal()
        self._free(False)

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        """As :meth:`Store.start`, once ``after`` is computed."""
        flat = self._flat
        shard = flat.param.data.view(-1).clone()  # a value of its own: tying changes it
        self._backend.tie([shard, *after])
        shard = shard.to(device=self._device, dtype=self._dtype)
        self.state = GATHERING
        full = shard.new_empty(self._layout.padded_numel)
        self.in_flight = Gather(self._gather(full, shard, async_op=True, label=flat.label), full)

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
