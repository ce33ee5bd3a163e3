"""Values that come later, with ``to_empty()``: until then everything is on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ..originals import FlatParamLike
from .base import Store
from .states import GATHERED, RELEASED, State


@final
class Deferred(Store):
    """Original parameters have shapes and never values; states only say whether a unit uses them."""

    def __init__(self, flat: FlatParamLike) -> None:
        super().__init__(flat)
        self._full = torch.empty(self._layout.padded_numel, dtype=self._dtype, device="meta")

    @property
    def gathered(self) -> torch.Tensor:
        return self._full

    def attach(self) -> None:
        self._reveal()
        self.show(self._full)
        self._conceal()

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERED

    def lock(self) -> None:
        """There is nothing that could be read or written."""

    def _arrive(self, values: torch.Tensor) -> None:
        """Nothing is gathered."""

    def _free(self, keep: bool) -> State:
        return RELEASED
