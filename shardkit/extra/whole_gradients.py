"""Full gradients beside full parameters, between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..errors import LifecycleError
from ..fsdp.flat_param import FlatParam
from ..fsdp.flat_values import put_together
from ..fsdp.optim_state import gather_parts
from ..fsdp.originals import as_tensors


def check_reduced(flats: Iterable[FlatParam]) -> None:
    """To be called before the original parameters are summoned.

    Raises:
        LifecycleError: there are gradients that ``no_sync`` keeps, which are not reduced yet.
    """
    for flat in flats:
        with as_tensors():
            waiting = any(m.param.grad is not None for m in flat.originals)
        if waiting:
            raise LifecycleError(
                f"rank {flat.group.ranks[flat.group.rank]}: gradients of {flat.names[0]!r} are this rank's own, from a "
                "backward inside of no_sync(); full gradients are there after the next backward outside of it"
            )


@contextlib.contextmanager
def whole_gradients(flats: Sequence[FlatParam], writeback: bool) -> Iterator[None]:
    """Inside, original parameters have their reduced gradients, in full shape; None where there is none (collective).

    Args:
        flats: whose original parameters are summoned.
        writeback: changes are kept. Ranks must make the same ones.

    """
    try:
        for flat in flats:
            _show(flat)
        yield
        for flat in flats if writeback else ():
            _keep(flat)
    finally:
        for flat in flats:
            for original in flat.originals:
                original.param.grad = None


def _show(flat: FlatParam) -> None:
    gradient = flat.param.grad
    if gradient is None:
        return
    for original, part, is_unused in zip(
        flat.originals, gather_parts(flat, gradient), flat.unused.originals, strict=True
    ):
        if not is_unused:
            original.param.grad = part.to(original.param)


@torch.no_grad()
def _keep(flat: FlatParam) -> None:
    gradient = flat.param.grad
    if gradient is None:
        return
    rows = [
        gradient.new_zeros(m.shape.numel()) if m.param.grad is None else m.param.grad.reshape(-1).to(gradient)
        for m in flat.originals
    ]
    size, rank = flat.layout.shard_numel, flat.group.rank
    gradient.copy_(put_together(rows, flat.layout)[rank * size : (rank + 1) * size].view(gradient.shape))
