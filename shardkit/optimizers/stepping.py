"""Hooks around the update of any optimizer: at its beginning, after each of its closures, and at its end.

torch calls hooks before and after ``step``. With a closure, gradients come in between: then what concerns them ends
before the closure runs, and begins anew after it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..torch_seams.compiling import not_compiled
from ..types import Args, Kwargs, Tree


class StepPart(Protocol):
    """Takes part in every step of every optimizer; cheap where it is not concerned."""

    def before(self, optimizer: Optimizer) -> None:
        """Is called when gradients are what the update will read."""

    def after(self, optimizer: Optimizer) -> None:
        """Undoes, once the update is through or gradients are about to change, what ``before`` did."""


_parts: list[StepPart] = []
_last: list[StepPart] = []  # the end of these: before an update after all others, and undone before them
_registered: list[object] = []
_lock = threading.Lock()  # ranks may be threads of one process


def take_part(part: StepPart, *, last: bool = False) -> None:
    """Has it called in every step from now on; once, however often it is asked for.

    Args:
        last: after all others, who find the groups as the program knows them.
    """
    with _lock:
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before))
            _registered.append(register_optimizer_step_post_hook(_after))
        if part not in _parts:
            if last:
                _last.append(part)
                _parts.append(part)
            else:
                _parts.insert(len(_parts) - len(_last), part)


@not_compiled
def _before(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Tree:
    for part in _parts:
        part.before(optimizer)
    # args begins with the optimizer itself
    if len(args) > 1 and callable(args[1]):
        return (args[0], _with_parts(optimizer, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _with_parts(optimizer, kwargs["closure"])}
    return None


@not_compiled
def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for part in reversed(_parts):
        part.after(optimizer)


def _with_parts(optimizer: Optimizer, closure: Callable[[], Tree]) -> Callable[[], Tree]:
    @functools.wraps(closure)
    def evaluated() -> Tree:
        _after(optimizer, (), {})
        loss = closure()
        for part in _parts:
            part.before(optimizer)
        return loss

    return evaluated
