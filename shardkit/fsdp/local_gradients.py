"""Gradients that ``no_sync`` accumulated on this rank, and how clearing them is noticed."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.optim import Optimizer

from ..errors import LifecycleError
from ..optimizers.shards import changed_by_steps
from ..optimizers.stepping import take_part
from ..reduction.shard_gradients import StandingGradient
from .gradients import GradientPack
from .originals import Listing, as_tensors


class LocalGradients:
    """Gradients of this rank's own that ``no_sync`` keeps for one registered parameter.

    After a backward inside ``no_sync`` the original parameters hold this rank's gradients, and the registered
    parameter, the shard, has nothing new. It gets a gradient of zeros all the same: ``optimizer.zero_grad()`` in any
    form changes that one, and so says that the original parameters' gradients are to be forgotten too.

    Gradients of a narrower dtype than the one in which they travel are kept in that one, or what is small would be lost
    to what has added up; autograd wants those of a parameter in the parameter's dtype, so they are kept here.
    """

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._standing = StandingGradient()
        self._wide: dict[int, torch.Tensor] = {}  # of original parameters, by number in the listing

    def note(self, pack: GradientPack) -> None:
        """A backward inside ``no_sync`` has ended; ``pack`` would have reduced the gradients."""
        listing = self._listing
        self.widen(pack.dtype)
        if not self.are_there():
            return
        if listing.param.grad is None:
            listing.param.grad = torch.zeros_like(listing.param, requires_grad=False)
            pack.clear_unused(listing)
        self._standing.stand(listing.param, listing.param.grad)
        _refuse_steps.note(self)

    @torch.no_grad()
    def widen(self, dtype: torch.dtype) -> None:
        """Adds the original parameters' gradients to those that are kept in a wider dtype, if this one is wider."""
        for number, original in enumerate(self._listing.originals):
            with as_tensors():
                gradient = original.param.grad
                if gradient is None or not gradient.is_floating_point() or gradient.is_sparse:
                    continue
                if dtype.itemsize <= gradient.dtype.itemsize:
                    return
                original.param.grad = None
            kept = self._wide.get(number)
            if kept is None:
                self._wide[number] = gradient.to(dtype)
            else:
                kept.add_(gradient)

    def take(self) -> dict[int, torch.Tensor]:
        """What is kept in a wider dtype, by number of the original parameter in the flat parameter."""
        wide, self._wide = self._wide, {}
        return {self._listing.first + number: gradient for number, gradient in wide.items()}

    def are_there(self) -> bool:
        """Whether any original parameter has a gradient of this rank's own."""
        with as_tensors():
            return bool(self._wide) or any(m.param.grad is not None for m in self._listing.originals)

    def drop(self) -> None:
        """Discards them."""
        self._wide.clear()
        with as_tensors():
            for m in self._listing.originals:
                m.param.grad = None

    def are_waiting(self) -> bool:
        """Whether gradients of this rank wait for a reduction, and nobody has cleared them."""
        return not self._standing.was_touched(self._listing.param) and self.are_there()

    def check_step(self, stepped: set[int]) -> None:
        """Raises LifecycleError if the shard's id is among these: such a step would leave the gradients out."""
        listing = self._listing
        if id(listing.param) in stepped and self.are_waiting():
            raise LifecycleError(
                f"rank {listing.group.ranks[listing.group.rank]}: step() comes after a backward inside of no_sync(): "
                f"gradients of {listing.label} are this rank's own, were not reduced, and the step "
                "would leave them out. Run the last backward before a step outside of no_sync(), or call zero_grad()"
            )

    def forget_if_cleared(self) -> None:
        """Before anything is added: clears the original parameters' gradients if the shard's was cleared."""
        if not self._standing.was_touched(self._listing.param):
            return
        self._standing.forget()
        if not self.are_there():
            return  # they were reduced meanwhile
        now = self._listing.param.grad
        are_kept = None if now is None else now.any()
        if are_kept is not None and not self._listing.group.backend.has_storage:
            with as_tensors():  # as data: to read it would run what was recorded
                for m in self._listing.originals:
                    g = m.param.grad
                    m.param.grad = None if g is None else torch.where(are_kept, g, 0)
        elif are_kept is None or not bool(are_kept):
            self.drop()


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
