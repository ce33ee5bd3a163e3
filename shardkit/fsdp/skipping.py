"""Keeps an optimizer from moving parameters that had no gradient though others of their flat parameter had.

Before a step their values and states are put aside, and put back after it (``reduction/unused.py``); where closures
make gradients within a step: after each of them, and before the next. It costs nothing where all original parameters
have gradients.

[Note: counts] State that is one number for the flat parameter, such as Adam's count of steps, is that of the others: a
original parameter that was put aside in some steps and takes part again has another bias correction than in a plain
process. That is warned of when it happens. (Not where execution is lazy: who took part is not known then.)
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..optimizers.stepping import take_part
from ..reduction.unused import PutAside, UnusedRanges, UsedMask, state_by_element
from .flat_param import FlatParam
from .originals import name_of_original

logger = logging.getLogger("shardkit")


class _Saved(NamedTuple):
    flat: FlatParam
    aside: PutAside


class _Skips:
    """What the steps of one optimizer leave alone.

    Attributes:
        saved: what was put aside for the step in progress.
        left_out: what had no gradient in some step, by its number in a flat parameter; None once that was warned of.
    """

    def __init__(self) -> None:
        self.saved: list[_Saved] = []
        self.left_out: weakref.WeakKeyDictionary[FlatParam, set[int]] | None = weakref.WeakKeyDictionary()


_NO_COUNTS = (torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)  # have one, and don't use it


def protect_unused(flat: FlatParam) -> None:
    """Optimizers leave parts of this flat parameter alone that had no gradient, from now until all have one."""
    take_part(_skip_unused)
    _skip_unused.note(flat)


def _unused_ranges(flat: FlatParam) -> list[tuple[int, int]]:
    """Parts of this rank's shard whose original parameters had no gradient, as (start, end)."""
    return [
        (p.offset, p.offset + p.numel)
        for p in flat.layout.pieces()
        if p.rank == flat.group.rank and flat.unused.originals[p.item]
    ]


class _SkipUnused:
    """The part that this takes in steps; see the top of this file."""

    def __init__(self) -> None:
        self._flats: weakref.WeakSet[FlatParam] = weakref.WeakSet()
        self._skips: weakref.WeakKeyDictionary[Optimizer, _Skips] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # ranks may be threads of one process

    def note(self, flat: FlatParam) -> None:
        """Something in it had no gradient."""
        with self._lock:
            self._flats.add(flat)

    def before(self, optimizer: Optimizer) -> None:
        if self._flats:
            self._put_aside(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        skips = self._skips.get(optimizer) if self._skips else None
        if skips is not None:
            saved, skips.saved = skips.saved, []
            for flat, aside in saved:
                aside.put_back(flat.param.data, optimizer.state.get(flat.param, {}))

    def _put_aside(self, optimizer: Optimizer) -> None:
        mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
        with self._lock:
            flats = [f for f in self._flats if id(f.param) in mine]
            for flat in flats:
                if not flat.unused.are_any:
                    self._flats.discard(flat)
            skips = self._skips.setdefault(optimizer, _Skips()) if flats else None
        if skips is None:
            return
        skips.saved = []
        for flat in flats:
            if flat.param.grad is None or flat.param.is_meta:
                continue
            _check_counts(optimizer, skips, flat)
            if not flat.unused.are_any:
                continue
            used = flat.unused.used
            unused = UsedMask(used) if used is not None else UnusedRanges(_unused_ranges(flat))
            state = optimizer.state.get(flat.param, {})
            skips.saved.append(_Saved(flat, PutAside(flat.param.data, state, unused)))


_skip_unused = _SkipUnused()


def _check_counts(optimizer: Optimizer, skips: _Skips, flat: FlatParam) -> None:
    """Warns, once for an optimizer, if a parameter takes part again whose count of steps is wrong now."""
    if skips.left_out is None:
        return
    left_out = skips.left_out.setdefault(flat, set())
    here = {p.item for p in flat.layout.pieces() if p.rank == flat.group.rank}
    again = sorted(k for k in left_out & here if not flat.unused.originals[k])
    left_out.update(k for k in here if flat.unused.originals[k])
    if not again or len(flat.originals) == 1 or not _counts(optimizer, flat.param):
        return
    skips.left_out = None
    logger.warning(
        "rank %d: parameter %r had no gradient in some steps (it was frozen, or not used) and has one again. %s counts "
        "the steps of the whole flat parameter that it is in, so that its bias correction (or whatever depends on that "
        "count) is not what it is in one process. Wrap what is frozen for a while as a unit of its own, or pass "
        "flatten=False (in the compat API: flatten_parameters=False)",
        flat.group.rank, name_of_original(flat.originals[again[0]].param), type(optimizer).__name__,
    )  # fmt: skip


def _counts(optimizer: Optimizer, param: torch.Tensor) -> bool:
    """Whether the update of a flat parameter depends on one number for it."""
    if isinstance(optimizer, _NO_COUNTS):
        return False
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(g["lr_decay"] for g in optimizer.param_groups)
    state = optimizer.state.get(param, {})
    numbers = (v for k, v in state.items() if k not in state_by_element(param, state))
    return any(
        isinstance(v, int | float) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in numbers
    )
