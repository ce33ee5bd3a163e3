"""Shards on the host, in full precision, with a copy on the device in the dtype that is computed in.

Legend: S shard numel, P bytes of a rank's shards in that dtype.

So the optimizer runs on the host, where its state is too, and nothing that is read there differs from what it is
without a copy: gradients, clipping, state dicts. What differs is what crosses the bus, and when.

- *Up.* Gathers read the copy. It is renewed after each step of an optimizer, P bytes, unit by unit in the order of
  forward; a unit's gather waits for its own part. Any other change of a shard is noticed in front of the next gather:
  by its version, or by a sample of its numbers where a program writes by ``.data`` (an EMA that is swapped in). Values
  are cast on the host, into pinned memory that nobody else writes to: what is on its way stays what it was, whatever
  the program does to the shards meanwhile.
- *Down.* A reduced gradient is copied as it has travelled between ranks, P bytes a backward, while backward goes on.
  The host waits for it at the end of backward, and casts it there.

[Note: steps in backward] Between backward and step a program may read and change all gradients: clip them, unscale
them, skip the step. So at the end of backward the host waits for all of them, and the device has nothing to do while
the optimizer runs. With :func:`~shardkit.step_in_backward` a program says that it does nothing of that. At the end of
backward, where the device still computes what the host has long issued, the host then takes one unit after the other:
it waits for its gradient, runs the optimizer over it, and sends the new values up.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..backend import DONE, Backend, Copy
from ..errors import ConfigurationError, LifecycleError
from ..optimizers.elementwise import is_known_elementwise, names_of_elementwise
from ..optimizers.shards import copy_options, listing_of
from ..types import AnyCallable, Tree
from .optimizer_check import first_steps
from .store import Stored

if TYPE_CHECKING:
    from .flat_param import FlatParam

_holders_of = torch._C._storage_Use_Count  # how many tensors look at a storage
_SAMPLE = 256  # numbers of a shard
_one = torch.empty(1)
_ALONE = _holders_of(_one.untyped_storage()._cdata)


class Landing:
    """Brings gradients of one shard from the device to the host.

    Attributes:
        is_idle: a gradient has come since the copy was read: the device, too, is through with it.
        then: called when a backward has brought its gradient.
    """

    def __init__(self, backend: Backend, size: int, dtype: torch.dtype) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._memory: dict[torch.dtype, torch.Tensor] = {}  # pinned
        self._arriving: list[tuple[torch.Tensor, Copy, list[bool], bool]] = []
        self.is_idle = False
        self.then: Callable[[], None] | None = None

    def start(self, gradient: torch.Tensor, had: list[bool], had_all: bool) -> None:
        """Copies a gradient of the device, [S], beside what is computed; notes who had it, and whether all had."""
        memory = self._unused(gradient.dtype)
        self._arriving.append((memory, self._backend.copy_down(memory, gradient), had, had_all))

    def taken(self) -> list[tuple[torch.Tensor, Copy, list[bool], bool]]:
        """Takes what :meth:`start` has begun: where to, what to wait for, and what was noted."""
        arriving, self._arriving = self._arriving, []
        return arriving

    def finish(self, memory: torch.Tensor, work: Copy) -> torch.Tensor:
        """Waits for one of these; returns it in the shard's dtype, [S]."""
        work.wait_on_host()
        return memory if memory.dtype == self._dtype else self._unused(self._dtype).copy_(memory)

    def landed(self, waited: bool) -> None:
        """Notes that the shard has its gradient; whether the host has ``waited`` for it."""
        self.is_idle = self.is_idle or waited
        if self.then is not None:
            self.then()

    def _unused(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [S] that nobody else looks at: that of the last step, unless its gradients are still there."""
        kept = self._memory.get(dtype)
        if kept is None or _holders_of(kept.untyped_storage()._cdata) > _ALONE:
            kept = self._memory[dtype] = self._backend.pinned(self._size, dtype)
        return kept.view(-1)


@final
class Mirrored(Stored):
    """Gathers from a copy of the shard.

    Attributes:
        copy: on the device, [S].
    """

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self.landing: Landing = Landing(self._backend, flat.layout.shard_numel, flat.param.dtype)
        size = flat.layout.shard_numel
        self.copy = torch.empty(size, dtype=self._dtype, device=self._device)
        self._staged = self._backend.pinned(size, self._dtype)
        self._work: Copy = DONE

    @torch.no_grad()
    def renew(self, always: bool = True) -> None:
        """Copies the shard to the device, beside what is computed; where it has another version, or ``always``."""
        shard = self._flat.param.data.view(-1)
        # changes around its version are told by some of its numbers
        sample = [] if shard.is_meta else shard[:: max(1, len(shard) // _SAMPLE)].tolist()
        now = self._flat.version, shard.data_ptr(), sample
        if not always and self.copied == now:
            return
        if not self._work.is_done():  # nothing has been computed with what came up last
            self._work.wait_on_host()
        self._work.wait()
        self._staged.copy_(shard)
        self._work = self._backend.copy_up(self.copy, self._staged, at_once=self.landing.is_idle)
        self.copied = now

    def sent(self) -> torch.Tensor:
        self.renew(always=False)
        self._work.wait()
        self.landing.is_idle = False
        return self.copy


# ------------------------------------------------------------ the step of an optimizer as a part of backward
@contextlib.contextmanager
def step_in_backward(optimizer: Optimizer) -> Iterator[None]:
    """Makes ``backward()`` inside the optimizer's ``step()`` and ``zero_grad()``, too (collective).

    ::

        with shardkit.step_in_backward(optimizer):
            loss.backward()

    For shards on the host (``OffloadPolicy(masters=True)``): the optimizer runs over a unit's shards while the device
    computes the rest of backward, and the new values go up meanwhile. The numbers are those of ``loss.backward()``,
    ``optimizer.step()`` and ``optimizer.zero_grad()``. Nothing can come between backward and step, so gradients can't
    be clipped or unscaled; a program that does so calls ``step()``. Micro-batches before the last one are outside.

    Args:
        optimizer: element-wise: of torch's, or declared (:func:`~shardkit.declare_elementwise`).

    Raises:
        ConfigurationError: the optimizer is another one, lists no such shards, or has hooks before its step.
        LifecycleError: a second backward inside, or that of a loss that a gradient scaler has scaled; or this is inside
            of :class:`~shardkit.SkipOutOfMemory`.
    """
    steps = _steps.get(optimizer)
    if steps is None or steps.are_of_others(optimizer):
        steps = _StepsByUnit(optimizer)
        _steps[optimizer] = steps
    steps.begin(optimizer)
    try:
        yield
        steps.step_rest(optimizer)
    finally:
        steps.end(optimizer)


class _StepsByUnit:
    """Makes of one optimizer one for each flat parameter, with the same state and options.

    So whatever looks at the steps of an optimizer over shards (``optimizer_check.py``) looks at these.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not is_known_elementwise(type(optimizer)):
            raise ConfigurationError(
                f"step_in_backward: {type(optimizer).__name__} may look at more than one parameter, or at what is not "
                f"there before backward ends; it is for torch's {names_of_elementwise()}. Call step() after backward; "
                "if it updates every element by itself: shardkit.declare_elementwise"
            )
        self._listed = _listed(optimizer)
        are_there = False
        found: dict[FlatParam, list[list[nn.Parameter]]] = {}  # by what they are of, of each group
        for k, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                listing = listing_of(param)
                if listing is not None and listing.flat.offloaded is not None:
                    are_there = True
                    if listing.flat.store.landing is not None:
                        found.setdefault(listing.flat, [[] for _ in self._listed])[k].append(param)
        self._parts = {flat: _part_of(optimizer, params) for flat, params in found.items()}
        self._stepped: set[FlatParam] = set()
        self._thread = 0  # that runs the block; backward may run in others
        if not are_there:  # else one rank that has all of them may need no copy
            raise ConfigurationError(
                "step_in_backward: the optimizer lists no shards on the host that the device has a copy of; shard with "
                "offload=OffloadPolicy(masters=True), or call step() after backward"
            )
        if any(flat.reduce.order is not None for flat in self._parts):
            raise ConfigurationError(
                'step_in_backward with ReducePolicy(order="fixed"): a step waits for other micro-batches there; call '
                "step() after the last one"
            )

    def are_of_others(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer lists other parameters by now, or they are elsewhere."""
        is_moved = any(flat.store.landing is None for flat in self._parts)
        return is_moved or _listed(optimizer) != self._listed

    def begin(self, optimizer: Optimizer) -> None:
        """Steps from now on follow each unit's gradient."""
        own = optimizer.__dict__.get("step")
        if optimizer._optimizer_step_pre_hooks or not (own is None or hasattr(own, "_wrapped_by_lr_sched")):
            raise ConfigurationError(
                "step_in_backward: the optimizer has hooks before its step (register_step_pre_hook), or a step() of "
                "its own, which would come after the steps of units; remove them, or call step() after backward"
            )
        self._refuse_skipping()
        first_steps.before(optimizer, is_due=False)
        first_steps.by_unit.add(optimizer)
        self._stepped, self._thread = set(), threading.get_ident()
        for flat, part in self._parts.items():
            part.state = optimizer.state
            copy_options(optimizer.param_groups, part.param_groups)
            if (landing := flat.store.landing) is not None:
                landing.then = partial(self._step, flat)

    def end(self, optimizer: Optimizer) -> None:
        """Gives gradients back to the program."""
        first_steps.by_unit.discard(optimizer)
        for flat in self._parts:
            if (landing := flat.store.landing) is not None:
                landing.then = None

    def _step(self, flat: FlatParam) -> None:
        if flat in self._stepped:
            raise LifecycleError(
                f"step_in_backward: a second backward inside of one block would be a second step of {flat.label}. Run "
                "the backwards of other micro-batches in front of the block, and the last one inside"
            )
        self._refuse_scaled()
        self._refuse_skipping()
        self._stepped.add(flat)
        part = self._parts[flat]
        part.step()
        part.zero_grad()

    def _refuse_skipping(self) -> None:
        if not may_be_skipped.isdisjoint(self._parts):
            raise LifecycleError(
                "step_in_backward inside of SkipOutOfMemory: a unit's step could not be taken back where a rank runs "
                "out of memory later in this backward. Call step() behind the with of SkipOutOfMemory"
            )

    def _refuse_scaled(self) -> None:
        scaler = _scaling.get(self._thread, lambda: None)()
        if scaler is not None:
            raise LifecycleError(
                f"step_in_backward with a loss that {type(scaler).__name__}.scale() has scaled, without an update() "
                "since: gradients have to be unscaled before a step. Call step() after backward, outside"
            )

    def step_rest(self, optimizer: Optimizer) -> None:
        """Steps what is sharded otherwise or not at all, and what this backward did not reach."""
        self._refuse_scaled()
        for flat in self._parts:
            if flat not in self._stepped:
                self._step(flat)
        optimizer.step()  # over what has a gradient still
        optimizer.zero_grad()


_steps: weakref.WeakKeyDictionary[Optimizer, _StepsByUnit] = weakref.WeakKeyDictionary()
may_be_skipped: weakref.WeakSet[FlatParam] = weakref.WeakSet()  # by batches that are not through yet
_scaling: dict[int, weakref.ref[GradScaler]] = {}  # by thread, what has scaled a loss since its last update


def notice_scaling() -> None:
    """Notes from now on whether a gradient scaler has scaled a loss."""
    if not hasattr(GradScaler.scale, "__wrapped__"):
        scale, update = GradScaler.scale, GradScaler.update
        GradScaler.scale, GradScaler.update = _noted(scale, True), _noted(update, False)  # type: ignore[method-assign]


def _noted(method: AnyCallable, scales: bool) -> AnyCallable:
    @functools.wraps(method)
    def noted(self: GradScaler, *args: Tree, **kwargs: Tree) -> Tree:
        _scaling.pop(threading.get_ident(), None)
        if scales and self.is_enabled():
            _scaling[threading.get_ident()] = weakref.ref(self)
        return method(self, *args, **kwargs)

    return noted


def _listed(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _part_of(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Optimizer:
    """Makes an optimizer that is another one in all but what it lists, and who hears of its steps."""
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(
        {
            name: OrderedDict() if name.endswith("_hooks") else value
            for name, value in optimizer.__dict__.items()
            if name != "step"  # a scheduler's, that counts the program's steps
        }
    )
    part.param_groups = [{"params": listed} for listed in params]
    return part
