"""Traces some steps of a training on all ranks, into one file: :func:`trace`, or the variable ``SHARDKIT_TRACE``.

Steps are those of the optimizer that steps first. While somebody asks, data loaders are heard too, and in models that
are not cut into units hooks on layers say where forward and backward are.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..backend import Backend, Group, backend_of_job
from ..errors import ConfigurationError, RankMismatchError
from ..launching.run_folder import write_at_once
from ..types import AnyCallable, Args, Framework, Kwargs, ProcessGroup, Tree
from .ranges import Heard, What, leave, listen, now, stop_listening
from .timeline import Recorder, compare_clocks, merged, part_path

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
        self._counted = None
        with _lock:
            left = tuple(watch for watch in _watches.pop(self._thread, ()) if watch is not self)
            if left:
                _watches[self._thread] = left
            _follow()

    def before(self, optimizer: Optimizer) -> None:
        self._leave(optimizer)  # it raised, the last time
        inside = Heard(What("step", type(optimizer).__name__))
        inside.__enter__()
        self._inside.append((optimizer, inside))

    def after(self, optimizer: Optimizer) -> None:
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
    """Makes a range of the time in which a batch is waited for, from now on."""
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
    """Does the opposite, as often."""
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


_models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # and the thread of its rank
_layer_watches: list[LayerWatch] = []


def note_model(module: nn.Module) -> None:
    """Notes that the calling rank trains it; nothing else says where it is."""
    _models[module] = threading.get_ident()
    for watch in _layer_watches:
        watch.watch(module)


class LayerWatch:
    """Makes ranges of the layers of all models of the calling rank, until it is closed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        self._inside: list[tuple[nn.Module, Heard]] = []
        for module in list(_models):
            self.watch(module)
        _layer_watches.append(self)

    def watch(self, module: nn.Module) -> None:
        if _models[module] == self._thread:
            for name, layer in layers_of(module):
                self._attach(name, layer)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in _layer_watches:
            _layer_watches.remove(self)

    def _attach(self, name: str, layer: nn.Module) -> None:
        forward, backward = What("forward", name), What("backward", name)

        def enter(module: nn.Module, args: Args) -> None:
            heard = Heard(forward)
            heard.__enter__()
            self._inside.append((module, heard))

        def end(module: nn.Module, args: Args, kwargs: Kwargs, outputs: Tree) -> None:
            while self._inside:
                last, heard = self._inside.pop()
                leave(heard)
                if last is module:
                    break
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(reached)

        def reached(_: torch.Tensor) -> None:
            with Heard(backward):
                pass  # a moment

        self._handles.append(layer.register_forward_pre_hook(enter))
        self._handles.append(layer.register_forward_hook(end, with_kwargs=True, always_call=True))


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the children that have parameters, in place of lists of modules their elements; below only children."""
    children = [(name, m) for name, m in module.named_children() if next(m.parameters(), None) is not None]
    if len(children) == 1 and next(children[0][1].children(), None) is not None:
        yield from layers_of(children[0][1], f"{prefix}{children[0][0]}.")
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for inner, element in child.named_children():
                if next(element.parameters(), None) is not None:
                    yield f"{prefix}{name}.{inner}", element
        else:
            yield f"{prefix}{name}", child


logger = logging.getLogger("shardkit")
VARIABLE = "SHARDKIT_TRACE"


class Tracer:
    """One rank's share in a trace.

    Args:
        path: the file that rank 0 writes.
        steps: which, counted from the first that ends after this object is made; None: from :meth:`begin` to
            :meth:`end`.
        group: the ranks.

    Attributes:
        is_done: the file is written.
    """

    def __init__(self, path: str | os.PathLike[str], steps: range | None, group: Group) -> None:
        self.path, self.group = Path(path), group
        self.is_done = False
        is_range = isinstance(steps, range) and steps.step == 1 and len(steps) > 0 and steps.start >= 0
        if steps is not None and not is_range:
            raise ConfigurationError(
                f"steps={steps!r}: say which steps are traced as range(10, 12), for the eleventh and the twelfth"
            )
        self._steps = steps
        self._recorder: Recorder | None = None
        self._layers: LayerWatch | None = None
        self._watch = StepWatch(self._step_ended)
        if steps is None or steps.start == 0:
            try:
                self.begin()
            except BaseException:
                self._stop()
                raise

    # ------------------------------------------------------------ a trace's course
    def begin(self) -> None:
        """Records from now on (collective).

        Raises:
            RankMismatchError: ranks trace different steps.
        """
        plan = None if self._steps is None else [self._steps.start, self._steps.stop]
        said = self.group.channel("control").all_gather_bytes(
            json.dumps([plan, self._obstacle()]).encode(), label="which steps are traced"
        )
        plans, (obstacle, *_) = zip(*map(json.loads, said), strict=True)
        if obstacle or any(theirs != plans[0] for theirs in plans):
            self._stop()
        if obstacle:
            raise ConfigurationError(f"rank 0 can't write {self.path}: {obstacle}")
        if any(theirs != plans[0] for theirs in plans):
            each = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(plans))
            raise RankMismatchError(
                f"ranks trace different steps ({each}); pass the same steps= on all ranks"
            )
        reading = compare_clocks(self.group)
        self._recorder = Recorder(self.group)
        self._recorder.clock.append(reading)
        self._layers = LayerWatch()
        hear_of_data()
        listen(self._recorder)

    def _obstacle(self) -> str:
        """Tells why rank 0 can't write the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
                return "it is a folder" if self.path.is_dir() else "its folder can't be written to"
        except OSError as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Records no more; rank 0 writes the file (collective)."""
        recorder = self._stop()
        if recorder is None:
            return
        recorder.clock.append(compare_clocks(self.group))
        sent = zlib.compress(json.dumps(recorder.part()).encode(), 1)
        parts = self.group.gather_object(sent, 0, label="parts of a trace")
        self.is_done = True
        if parts is not None:
            whole = merged([json.loads(zlib.decompress(part)) for part in parts])
            write_at_once(self.path, json.dumps(whole))
            logger.info("%s has a trace of %d ranks: shardkit trace %s", self.path, len(parts), self.path)

    def abandon(self) -> None:
        """Records no more; each rank that has recorded anything writes its own part, for ``shardkit trace`` to put
        together."""
        recorder = self._stop()
        if recorder is not None and recorder.events:
            rank = self.group.ranks[self.group.rank]
            write_at_once(part_path(self.path, rank), json.dumps(recorder.part()))

    def _stop(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        self._watch.close()
        if self._layers is not None:
            self._layers.close()
        if recorder is not None:
            stop_listening(recorder)
            forget_data()
            recorder.ended = now()
        return recorder

    def _step_ended(self, count: int) -> None:
        if self._recorder is not None:
            self._recorder.steps.append((count - 1, now()))
        if self._steps is None:
            return
        if count == self._steps.stop:
            self.end()
        elif count == self._steps.start:
            self.begin()


@contextmanager
def trace(
    path: str | os.PathLike[str],
    steps: range | None = None,
    *,
    group: ProcessGroup = None,
    backend: str | Backend | None = None,
) -> Iterator[Tracer]:
    """Traces what is inside, or some steps of it, on all ranks (collective).

    ::

        with shardkit.trace("trace.json", steps=range(10, 12)):
            for batch in loader:
                ...

    Rank 0 writes one file for all ranks, that https://ui.perfetto.dev and chrome://tracing show and
    ``shardkit trace FILE`` explains: which rank waits for which other, in which unit, and why. A step ends with that of
    the optimizer that steps first. Where an error leaves the block, each rank writes its own part beside.

    Args:
        path: of the file.
        steps: counted from the beginning of the block; None: everything inside.
        group: the ranks; None for all.
        backend: theirs, by name or itself, where it is not that of the job's process group.

    Raises:
        ConfigurationError: ``steps`` is no range of at least one step; rank 0 can't write the file.
        RankMismatchError: ranks trace different steps.
    """
    tracer = Tracer(path, steps, backend_of_job(backend).group(group))
    try:
        yield tracer
    except BaseException:
        tracer.abandon()
        raise
    tracer.end()
    if not tracer.is_done:
        logger.warning(
            "nothing was traced: none of the %s began; a step ends with that of the optimizer that steps first",
            steps,
        )


# ------------------------------------------------------------ by the environment
_of_environment: dict[int, Tracer] = {}  # by thread: ranks may be threads of one process


def training_begins(group: Group) -> None:
    """Begins what ``SHARDKIT_TRACE`` asks for, as the calling rank shards something."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    everybody, me = group.backend.group(None), threading.get_ident()
    known = _of_environment.get(me)
    if known is not None and known.group is everybody:
        return
    steps, folder = read_plan(asked)
    _of_environment[me] = tracer = Tracer(folder / "trace.json", steps, everybody)
    atexit.register(tracer.abandon)  # a training that ends before the last of these steps


def read_plan(text: str, where: str = VARIABLE) -> tuple[range, Path]:
    """Reads ``steps=10:12,dir=/path``, which has both step 10 and step 12, as a range and a folder.

    Args:
        where: it was asked for, as errors name it.
    """
    found = re.fullmatch(r"steps=(\d+):(\d+)(?:,dir=(.+))?", text.strip())
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigurationError(
            f"{where} {text!r}: write steps=FIRST:LAST, as steps=10:12 for the steps 10, 11 and 12 (the first is 0); "
            f"for the variable {VARIABLE} also where to, as steps=10:12,dir=runs/1"
        )
    return range(int(found[1]), int(found[2]) + 1), Path(found[3] or ".")
