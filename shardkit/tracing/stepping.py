"""Counts the steps of a training by those of its optimizer, and hears of data loaders; for as long as somebody asks."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..types import AnyCallable, Framework, Tree
from .ranges import Heard, What, leave

# By thread, for ranks may be threads of one process. Torch's hooks for all optimizers are registered once and for good:
# they can't be taken away while torch goes through them, as it does when a step ends. While nobody counts steps, a
# function written in C is in their place, which takes any arguments, does nothing and costs no Python call.
_watches: dict[int, tuple[StepWatch, ...]] = {}
_handles: list[RemovableHandle] = []
_silent = functools.partial(sys.audit, "shardkit.step")
_lock = threading.Lock()


def _before(optimizer: Optimizer, *_: object) -> None:
    for watch in _watches.get(threading.get_ident(), ()):
        watch.before(optimizer)


def _after(optimizer: Optimizer, *_: object) -> None:
    for watch in _watches.get(threading.get_ident(), ()):
        watch.after(optimizer)


def _follow() -> None:
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))
    for handle, hook in zip(_handles, (_before, _after), strict=True):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = hook if _watches else _silent


class StepWatch:
    """Calls ``ended`` when a step is through: one of the optimizer that stepped first, from outside of others' steps.

    Args:
        ended: called in the thread that made this object, with the number of steps since.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self._inside: list[tuple[Optimizer, Heard]] = []
        self._counted: Optimizer | None = None
        self.count = 0
        with _lock:
            _watches[self._thread] = (*_watches.get(self._thread, ()), self)
            _follow()

    def close(self) -> None:
        """Counts no more."""
        self._counted = None
        with _lock:
            left = tuple(watch for watch in _watches.pop(self._thread, ()) if watch is not self)
            if left:
                _watches[self._thread] = left
            _follow()

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        self._leave(optimizer)  # it raised, the last time
        inside = Heard(What("step", type(optimizer).__name__))
        inside.__enter__()
        self._inside.append((optimizer, inside))

    def after(self, optimizer: Optimizer) -> None:
        """An optimizer's step ends."""
        self._leave(optimizer)
        if self._inside:
            return
        if self._counted is None:
            self._counted = optimizer
        if optimizer is self._counted:
            self.count += 1
            self._ended(self.count)

    def _leave(self, optimizer: Optimizer) -> None:
        if any(other is optimizer for other, _ in self._inside):
            while True:
                last, inside = self._inside.pop()
                leave(inside)
                if last is optimizer:
                    return


_waits = 0  # for batches: how many ask
_patched: list[tuple[Framework, AnyCallable]] = []


def hear_of_data() -> None:
    """From now on, the time in which a batch is waited for is a range."""
    global _waits
    with _lock:
        _waits += 1
        if _waits > 1:
            return
        for name in ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader"):
            kind = getattr(sys.modules.get(name), "_BaseDataLoaderIter", None)
            if kind is not None and "__next__" in vars(kind):
                _patched.append((kind, kind.__next__))
                kind.__next__ = _heard(kind.__next__)


def forget_data() -> None:
    """The opposite, as often."""
    global _waits
    with _lock:
        _waits -= 1
        while _waits == 0 and _patched:
            kind, original = _patched.pop()
            kind.__next__ = original


def _heard(following: AnyCallable) -> AnyCallable:
    what = What("data", "DataLoader")

    @functools.wraps(following)
    def heard(*args: Tree, **kwargs: Tree) -> Tree:
        with Heard(what):
            return following(*args, **kwargs)

    return heard
