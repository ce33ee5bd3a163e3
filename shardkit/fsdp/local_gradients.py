"""Gradients that ``no_sync`` accumulated on this rank, and how clearing them is noticed."""

from __future__ import annotations

import torch

from ..reduction.clearing import StandingGradient
from .flat_param import FlatParam
from .gradients import GradientPack
from .originals import as_tensors


class LocalGradients:
    """Watches whether somebody cleared the gradient of a shard whose original parameters hold gradients of their own.

    After a backward inside ``no_sync`` the original parameters hold this rank's gradients, and the listed parameter,
    the shard, has nothing new. It gets a gradient of zeros all the same: ``optimizer.zero_grad()`` in any form changes
    that one, and so says that the original parameters' gradients are to be forgotten too.
    """

    def __init__(self, flat: FlatParam) -> None:
        self._flat = flat
        self._standing = StandingGradient()

    def note(self, pack: GradientPack) -> None:
        """A backward inside ``no_sync`` has ended; ``pack`` would have reduced the gradients."""
        flat = self._flat
        with as_tensors():
            if all(m.param.grad is None for m in flat.originals):
                return
        if flat.param.grad is None:
            flat.param.grad = torch.zeros_like(flat.param, requires_grad=False)
            pack.clear_unused()
        self._standing.stand(flat.param, flat.param.grad)

    def forget_if_cleared(self) -> None:
        """Before anything is added: clears the original parameters' gradients if the shard's was cleared."""
        if not self._standing.was_touched(self._flat.param):
            return
        self._standing.forget()
        now = self._flat.param.grad
        if now is None or not bool(now.any()):
            with as_tensors():
                for m in self._flat.originals:
                    m.param.grad = None
