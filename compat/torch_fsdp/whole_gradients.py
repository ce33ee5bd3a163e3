"""Full gradients beside full parameters, between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from shardkit.errors import LifecycleError
from shardkit.fsdp.flat_param import FlatParam
from shardkit.fsdp.flat_values import put_together
from shardkit.fsdp.optim_state import gather_parts
from shardkit.fsdp.registered import Registered
from shardkit.fsdp.unit import Unit


def check_reduced(units: Iterable[Unit]) -> None:
    """To be called before the original parameters are summoned.

    Raises:
        LifecycleError: there are gradients that ``no_sync`` keeps, which are not reduced yet.
    """
    for unit in units:
        if unit.has_local_gradients():
            flat = unit.flats[0]
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
            for listing in flat.listings:
                _show(listing)
        yield
        for flat in flats if writeback else ():
            for listing in flat.listings:
                _keep(listing)
    finally:
        for flat in flats:
            for original in flat.originals:
                original.param.grad = None


def _show(listing: Registered) -> None:
    gradient, unused = listing.param.grad, listing.flat.unused.originals[listing.first :]
    if gradient is None:
        return
    parts = gather_parts(listing, gradient)
    for original, part, is_unused in zip(listing.originals, parts, unused, strict=False):
        if not is_unused:
            original.param.grad = part.to(original.param)


@torch.no_grad()
def _keep(listing: Registered) -> None:
    gradient = listing.param.grad
    if gradient is None:
        return
    rows = [
        gradient.new_zeros(m.shape.numel()) if m.param.grad is None else m.param.grad.reshape(-1).to(gradient)
        for m in listing.originals
    ]
    own = put_together(rows, listing.layout)[listing.layout.part(listing.group.rank)]
    gradient.copy_(own.view(gradient.shape))
