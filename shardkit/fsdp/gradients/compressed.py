"""Gradients that travel as blocks."""

from __future__ import annotations

from typing import final

import torch

from ...backend import Group
from ...policy import ReducePolicy
from ...reduction.compression import BlockFormat, CompressedReduceScatter
from ..flat_param import FlatParam
from .pack import Reduction
from .stored import StoredPack


@final
class CompressedPack(StoredPack):
    """As :class:`StoredPack`, whose buffer [W * (S + F)] is given back as soon as its blocks are made."""

    def __init__(
        self, flat: FlatParam, group: Group, reduce: ReducePolicy, divisors: tuple[float, float], blocks: BlockFormat
    ) -> None:  # fmt: skip
        super().__init__(flat, group, reduce, divisors, blocks)
        self._after = divisors[0] * divisors[1]  # sums are of fp32
        self._exchange = CompressedReduceScatter(group, blocks, self._form.sizes, reduce.error_feedback)

    def _scatter(self, packed: torch.Tensor, had: list[bool], had_all: bool) -> Reduction:
        label = f"gradients of {self._flat.label}"
        result, work = self._exchange.start(packed, label, complete=had_all)
        self._group.backend.release_storage(packed)
        return Reduction(had, had_all, result, work)

    def _arrived(self) -> None:
        """It was given back."""

    def forget_errors(self) -> None:
        self._exchange.feedback.forget()
