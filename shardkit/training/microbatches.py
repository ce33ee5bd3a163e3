"""Gives a micro-batch, on any number of ranks, random numbers of its own and its place in a sum of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from ..backend import Backend, backend_for
from ..model_parallel.random import device_backend, seeded_state
from ..types import ProcessGroup
from .data import generators_kept, mixed, seed_generators
from .evaluation import gather_tensors

__all__ = ["mean_loss", "microbatch"]


@contextmanager
def microbatch(number: int, seed: int = 0) -> Iterator[None]:
    """Gives a micro-batch random numbers of its own, whichever rank runs it; afterwards generators go on as before.

    ::

        for k in range(rank, K, world_size):  # of the K micro-batches of a step
            with shardkit.microbatch(step * K + k):
                loss = model(batches[k]).mean()
                loss.backward()

    Seeded are torch's generators of the host and of the device, ``random`` and ``numpy.random``.

    Args:
        number: of the micro-batch, counted over the whole training.
        seed: of the training.
    """
    own = mixed(seed, 0, number, "microbatch")
    backend = device_backend()
    with generators_kept():
        before = backend.rng_state()
        seed_generators(own)
        backend.set_rng_state(seeded_state(own))
        try:
            yield
        finally:
            backend.set_rng_state(before)


def mean_loss(
    losses: Sequence[torch.Tensor], group: ProcessGroup = None, *, backend: str | Backend | None = None
) -> torch.Tensor:
    """Computes the mean over a step's micro-batches, added in the order of their numbers, on every rank (collective).

    Args:
        losses: of this rank's, 0-dim, in the order in which it ran them: rank r's are number r, W + r, 2 * W + r, ... A
            rank may have fewer than others, or none.
        group: which ranks; None for all.
        backend: name or instance of the backend; by default that of the losses' device.

    Returns:
        A 0-dim tensor of fp64 without a graph, with the same bits on any number of ranks.
    """
    chosen = backend_for(list(losses), backend)
    own = torch.zeros(0, dtype=torch.float64, device=losses[0].device if losses else chosen.device())
    if losses:
        own = torch.stack([loss.detach().double() for loss in losses])
    rounds = zip_longest(*[part.unbind() for part in gather_tensors(own, group, backend=chosen)])
    there = [loss for of_one in rounds for loss in of_one if loss is not None]
    total = torch.zeros_like(there[0])
    for loss in there:
        total += loss
    return total / len(there)
