"""Keeps an optimizer from moving parameters that had no gradient though others of their flat parameter had.

Before a step their values and states are put aside, and put back after it (``reduction/unused.py``); where closures
make gradients within a step: after each of them, and before the next. It costs nothing where all original parameters
have gradients.

[Note: counts] State that is one number for the flat parameter, such as Adam's count of steps, is that of the others: a
original parameter that was put aside in some steps and takes part again has another bias correction than in a plain
process. All ranks warn of that when it happens, also those that have no part of the parameter: as far as they can tell,
which is by what they used themselves. (Not where execution is lazy: who took part is not known then.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from ..reduction.unused import PutAside, UnusedRanges, UsedMask, state_by_element
from .originals import FlatParamLike, name_of_original

logger = logging.getLogger("shardkit")
_NO_COUNTS = (torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)  # have one, and don't use it


class Skips:
    """What the steps of one optimizer leave alone.

    Attributes:
        saved: what was put aside for the step in progress.
        left_out: by label of a flat parameter, the numbers of those in it that had no gradient in some step; None once
            that was warned of.
    """

    def __init__(self) -> None:
        self.saved: list[tuple[FlatParamLike, PutAside]] = []
        self.left_out: dict[str, set[int]] | None = {}

    def put_aside(self, optimizer: Optimizer, flats: Iterable[FlatParamLike]) -> None:
        """Before a step over these."""
        for flat in flats:
            unused, param, left_out = flat.unused, flat.param, self.left_out
            are_some = True in unused.originals
            if left_out is not None and unused.is_noted and (are_some or flat.label in left_out):
                self._check_counts(optimizer, flat, left_out.setdefault(flat.label, set()))
            if param.grad is None or param.is_meta:
                continue
            if are_some or unused.used is not None:
                used = unused.used
                kept = UnusedRanges(_unused_ranges(flat)) if used is None else UsedMask(used)
                self.saved.append((flat, PutAside(param.data, optimizer.state.get(param, {}), kept)))

    def put_back(self, optimizer: Optimizer) -> None:
        """After it."""
        saved, self.saved = self.saved, []
        for flat, aside in saved:
            aside.put_back(flat.param.data, optimizer.state.get(flat.param, {}))

    def _check_counts(self, optimizer: Optimizer, flat: FlatParamLike, left_out: set[int]) -> None:
        """Warns, once for an optimizer, if a parameter takes part again whose count of steps is wrong now."""
        unused, pieces = flat.unused.originals, flat.layout.pieces()
        again = sorted(k for k in left_out if not unused[k])
        stepping = {p.rank for p in pieces if not unused[p.item]}
        left_out.update(p.item for p in pieces if unused[p.item] and p.rank in stepping)
        if not again or not _holds_several(flat) or not _counts(optimizer):
            return
        self.left_out = None
        logger.warning(
            "rank %d: parameter %r had no gradient in some steps (it was frozen, or not used) and has one again. %s "
            "counts the steps of the whole flat parameter that it is in, so that its bias correction (or whatever "
            "depends on that count) is not what it is in one process. Shard with shardkit.fully_shard, which leaves "
            "each parameter its own count; or wrap what sits out as a unit of its own, or pass flatten=False "
            "(flatten_parameters=False, use_orig_params=True)",
            flat.group.rank, name_of_original(flat.originals[again[0]].param), type(optimizer).__name__,
        )  # fmt: skip


def _unused_ranges(flat: FlatParamLike) -> list[tuple[int, int]]:
    """Parts of this rank's shard whose original parameters had no gradient, as (start, end)."""
    return [
        (p.offset, p.offset + p.numel)
        for p in flat.layout.pieces()
        if p.rank == flat.group.rank and flat.unused.originals[p.item]
    ]


def _holds_several(flat: FlatParamLike) -> bool:
    """Whether what an optimizer lists of it, and keeps one state for, is several original parameters."""
    return len(flat.originals) > 1


def _counts(optimizer: Optimizer) -> bool:
    """Whether the update of a flat parameter depends on one number for it."""
    if isinstance(optimizer, _NO_COUNTS):
        return False
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(g["lr_decay"] for g in optimizer.param_groups)
    return any(
        isinstance(v, int | float) or (isinstance(v, torch.Tensor) and v.numel() == 1)
        for param, state in optimizer.state.items()
        for k, v in state.items()
        if k not in state_by_element(param, state)
    )
