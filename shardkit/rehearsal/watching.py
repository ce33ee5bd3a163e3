"""Notes what each rank does: steps, losses, passes over data, what it sends. The script does nothing for it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from shardkit.backends.diagnosis.calls import Call
from shardkit.backends.simulated.places import Place, here
from shardkit.optimizers.stepping import take_part
from shardkit.types import Tree

from .memory import resizing
from .ranks import Loader, Rank, Sent, current


class EnoughSteps(BaseException):
    """A rank has made as many steps as were asked for; no error, so that no ``except Exception`` keeps it."""


class _Nothing:
    """Makes shardkit's own hooks come before ours: what they undo after a step is undone when we end it."""

    def before(self, optimizer: Optimizer) -> None: ...
    def after(self, optimizer: Optimizer) -> None: ...


_NOTHING = _Nothing()


class _Steps(threading.local):
    """How many steps each optimizer of this thread's rank has made, and how many it is inside of."""

    def __init__(self) -> None:
        self.depth = 0
        self.made: dict[int, int] = {}


@contextlib.contextmanager
def watching(steps: int | None) -> Iterator[None]:
    """Inside, :class:`Seen` of each rank is kept.

    Args:
        steps: a rank ends (:class:`EnoughSteps`) when one of its optimizers has made that many.
    """
    mine = _Steps()

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        mine.depth += 1

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        mine.depth = max(0, mine.depth - 1)
        rank = current()
        if rank is None or mine.depth:  # an optimizer inside of another one
            return
        made = mine.made[id(optimizer)] = mine.made.get(id(optimizer), 0) + 1
        rank.seen.steps = max(rank.seen.steps, made)
        if steps is not None and made >= steps:
            raise EnoughSteps

    take_part(_NOTHING)
    with ExitStack() as stack:
        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            stack.callback(handle.remove)
        for owner, name, replace in (
            (torch.Tensor, "backward", _noting_losses),
            (DataLoader, "__iter__", _noting_loaders),
            (torch.UntypedStorage, "resize_", resizing),
        ):
            stack.enter_context(mock.patch.object(owner, name, replace(getattr(owner, name))))
        yield


def _noting_losses(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def noting(loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        rank = current()
        if rank is not None and type(loss) is torch.Tensor and loss.numel() == 1:
            losses = rank.seen.losses
            losses.extend([] for _ in range(len(losses), rank.seen.steps + 1))
            losses[rank.seen.steps].append(float(loss.detach()))
        backward(loss, *args, **kwargs)

    return noting


def _noting_loaders(iterate: Callable[..., Tree]) -> Callable[..., Tree]:
    @functools.wraps(iterate)
    def noting(loader: Tree) -> Tree:
        rank = current()
        if rank is not None:
            try:
                batches: int | None = len(loader)
            except (TypeError, NotImplementedError):
                batches = None
            rank.seen.loaders.append(Loader(here(), batches, loader.batch_size))
        return iterate(loader)

    return noting


def note_call(rank: Rank, call: Call, place: Place, size: int, world_size: int) -> None:
    """A collective over ``size`` bytes among ``world_size`` ranks."""
    kind = Sent(call.operation.partition("(")[0], place)
    rank.seen.calls[kind] += 1
    if call.operation == "send":
        rank.seen.sent[kind] += size
    elif call.operation != "recv":
        twice = 2 if call.operation.startswith("all_reduce") else 1
        rank.seen.sent[kind] += twice * size * (world_size - 1) // world_size
