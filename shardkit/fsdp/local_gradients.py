"""Gradients that ``no_sync`` accumulated on this rank, and how clearing them is noticed."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.optim import Optimizer

from ..errors import LifecycleError
from ..optimizers.shards import changed_by_steps
from ..optimizers.stepping import take_part
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
        if not self._are_there():
            return
        if flat.param.grad is None:
            flat.param.grad = torch.zeros_like(flat.param, requires_grad=False)
            pack.clear_unused()
        self._standing.stand(flat.param, flat.param.grad)
        _refuse_steps.note(self)

    def _are_there(self) -> bool:
        with as_tensors():
            return any(m.param.grad is not None for m in self._flat.originals)

    def are_waiting(self) -> bool:
        """Whether gradients of this rank wait for a reduction, and nobody has cleared them."""
        return not self._standing.was_touched(self._flat.param) and self._are_there()

    def check_step(self, stepped: set[int]) -> None:
        """Raises LifecycleError if the shard's id is among these: such a step would leave the gradients out."""
        flat = self._flat
        if id(flat.listed) in stepped and self.are_waiting():
            raise LifecycleError(
                f"rank {flat.group.ranks[flat.group.rank]}: step() comes after a backward inside of no_sync(): "
                f"gradients of {flat.label or 'an FSDP module'} are this rank's own, were not reduced, and the step "
                "would leave them out. Run the last backward before a step outside of no_sync(), or call zero_grad()"
            )

    def forget_if_cleared(self) -> None:
        """Before anything is added: clears the original parameters' gradients if the shard's was cleared."""
        if not self._standing.was_touched(self._flat.param):
            return
        self._standing.forget()
        if not self._are_there():
            return  # they were reduced meanwhile
        now = self._flat.param.grad
        are_kept = None if now is None else now.any()
        with as_tensors():
            local = [(m.param, m.param.grad) for m in self._flat.originals]
            if are_kept is not None and not self._flat.group.backend.has_storage:
                for p, g in local:  # as data: to read it would run what was recorded
                    p.grad = None if g is None else torch.where(are_kept, g, 0)
            elif are_kept is None or not bool(are_kept):
                for p, _ in local:
                    p.grad = None


class _RefuseSteps:
    """Takes part in steps while there are gradients that ``no_sync`` keeps."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[LocalGradients] = weakref.WeakSet()
        self._lock = threading.Lock()  # ranks may be threads of one process

    def note(self, local: LocalGradients) -> None:
        """It has gradients that are not reduced."""
        take_part(self)
        with self._lock:
            self._waiting.add(local)

    def before(self, optimizer: Optimizer) -> None:
        if not self._waiting:
            return
        stepped = {id(changed_by_steps(p)) for group in optimizer.param_groups for p in group["params"]}
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.difference_update([local for local in waiting if not local.are_waiting()])
        for local in waiting:
            local.check_step(stepped)

    def after(self, optimizer: Optimizer) -> None:
        """Nothing was done before."""


_refuse_steps = _RefuseSteps()
