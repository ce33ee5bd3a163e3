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


_flats: weakref.WeakSet[FlatParam] = weakref.WeakSet()
_saved: weakref.WeakKeyDictionary[Optimizer, list[_Saved]] = weakref.WeakKeyDictionary()
_left_out: weakref.WeakKeyDictionary[Optimizer, weakref.WeakKeyDictionary[FlatParam, set[int]]] = (
    weakref.WeakKeyDictionary()  # those here that had no gradient in some step; an optimizer warned of has none
)
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_NO_COUNTS = (torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)  # have one, and don't use it
_lock = threading.Lock()  # ranks may be threads of one process


def protect_unused(flat: FlatParam) -> None:
    """Optimizers leave parts of this flat parameter alone that had no gradient, from now until all have one."""
    take_part(_skip_unused)
    with _lock:
        _flats.add(flat)


def _unused_ranges(flat: FlatParam) -> list[tuple[int, int]]:
    """Parts of this rank's shard whose original parameters had no gradient, as (start, end)."""
    return [
        (p.offset, p.offset + p.numel)
        for p in flat.layout.pieces()
        if p.rank == flat.group.rank and flat.unused.originals[p.item]
    ]


def _put_aside(optimizer: Optimizer) -> None:
    mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
    with _lock:
        flats = [f for f in _flats if id(f.param) in mine]
        for flat in flats:
            if not flat.unused.are_any:
                _flats.discard(flat)
    saved = []
    for flat in flats:
        if flat.param.grad is None or flat.param.is_meta:
            continue
        _check_counts(optimizer, flat)
        if not flat.unused.are_any:
            continue
        used = flat.unused.used
        unused = UsedMask(used) if used is not None else UnusedRanges(_unused_ranges(flat))
        state = optimizer.state.get(flat.param, {})
        saved.append(_Saved(flat, PutAside(flat.param.data, state, unused)))
    if saved:
        _saved[optimizer] = saved


def _check_counts(optimizer: Optimizer, flat: FlatParam) -> None:
    """Warns, once for an optimizer, if an original parameter takes part again whose count of steps is wrong now."""
    if optimizer in _warned:
        return
    with _lock:
        left_out = _left_out.setdefault(optimizer, weakref.WeakKeyDictionary()).setdefault(flat, set())
    here = {p.item for p in flat.layout.pieces() if p.rank == flat.group.rank}
    again = sorted(k for k in left_out & here if not flat.unused.originals[k])
    left_out.update(k for k in here if flat.unused.originals[k])
    if not again or len(flat.originals) == 1 or not _counts(optimizer, flat.param):
        return
    _warned.add(optimizer)
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


def _restore(optimizer: Optimizer) -> None:
    for flat, aside in _saved.pop(optimizer, []):
        aside.put_back(flat.param.data, optimizer.state.get(flat.param, {}))


class _SkipUnused:
    """See the top of this file."""

    def before(self, optimizer: Optimizer) -> None:
        if _flats:
            _put_aside(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        if optimizer in _saved:
            _restore(optimizer)


_skip_unused = _SkipUnused()
