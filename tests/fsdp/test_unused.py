"""Which original parameters count as unused: all orders of a few gradients, against sets."""

from __future__ import annotations

import itertools

import torch

from shardkit.fsdp.flat_param import Unused

COUNT = 2
HAD = list(itertools.product([False, True], repeat=COUNT))
NEW = [True, False]


def test_parameters() -> None:
    for notes in itertools.product(itertools.product(HAD, NEW), repeat=3):
        unused, used = Unused(COUNT), set()
        unused.clear(None)
        for had, is_new in notes:
            unused.note(had, itertools.repeat(is_new))
            now = {k for k in range(COUNT) if had[k]}
            used = now if is_new else used | now
            assert unused.originals == [k not in used for k in range(COUNT)]
        unused.clear(None)
        assert unused.originals == [True] * COUNT


def test_elements_where_execution_is_lazy() -> None:
    """None: all elements have had a gradient."""
    masks = [None, *(torch.tensor(had) for had in HAD)]
    for notes in itertools.product(itertools.product(masks, NEW), repeat=2):
        unused = Unused(COUNT)
        unused.clear(torch.tensor([False] * COUNT))
        used = torch.tensor([False] * COUNT)
        for mask, is_new in notes:
            now = torch.tensor([True] * COUNT) if mask is None else mask
            unused.note_elements(mask, now.tolist(), is_new)
            used = now if is_new else used | now
            assert (
                unused.originals == (~used).tolist()
            )  # as far as this rank knows; the truth is data, in ``used``
            assert (unused.used is None and bool(used.all())) or torch.equal(unused.used, used)
