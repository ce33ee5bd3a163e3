"""One wrapped module's share in the engine: what it needs gathered, and how far its backward has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import torch

from ..backend import Group
from ..policy import ReducePolicy
from ..reduction.compression import CompressedAllReduce
from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import NO_BACKWARD, BackwardState, GradientHooks, current_backward
from ..tracing.ranges import UNNAMED, UnitRanges
from .flat_param import FlatParam
from .gradients import GradientPack, Replicas, packed_dtype, way_for
from .local_gradients import LocalGradients
from .originals import as_tensors
from .refusals import backward_when_summoned, unknown_root, written_original
from .store import GATHERING, KEPT, SUMMONED, gather_together

_requires_grad = attrgetter("param.requires_grad")


class Runner(Protocol):
    """What runs the units of a root: an :class:`Engine`, which has these described."""

    state: BackwardState
    after: list[torch.Tensor]

    def begin_backward(self) -> None: ...
    def reach(self, unit: Unit, gradient: torch.Tensor | None) -> None: ...
    def complete(self, unit: Unit) -> None: ...
    def defer(self, unit: Unit) -> None: ...
    def leave(self, unit: Unit) -> None: ...


class Unit:
    """The flat parameters of one wrapped module.

    Attributes:
        name: path of the wrapper in the root module.
        ranges: what it does, in traces.
        flats: flat parameters that this unit owns.
        borrowed: those of other units with weights that this unit's module uses too.
        needs: both.
        keeps_between: a mesh of ranks keeps its values from forward to backward.
        keep_after_forward: stays gathered between forward and backward.
        engine: runs the unit; the root's.
        is_held: gathered on behalf of this unit.
        reduced: its gradients were sent in this backward.
        position: place in the order of backward; -1 where it has none.
        is_reached: backward may go through its last forward on this rank, as far as forward tells.
        goes_backward: it may on some rank: the unit is gathered for backward.
        is_undecided: ranks have not heard from each other whether it is gathered for backward.
        has_frozen: some of what it needs is not trainable.
        task: the backward that has reached its outputs last.
        backwards: of a root's unit, how many have gone through it.
    """

    def __init__(
        self,
        flats: Sequence[FlatParam],
        borrowed: Sequence[FlatParam],
        keep_after_forward: bool,
        reduce: ReducePolicy,
        divisors: tuple[float, float],
        replicas: Group | None = None,
    ) -> None:
        self.name = ""
        self.ranges: UnitRanges = UNNAMED
        self.flats = list(flats)
        self.borrowed = list(borrowed)
        self.keep_after_forward = keep_after_forward
        self.reduce = reduce
        self.divisors = divisors
        self.replicas = replicas
        self.engine: Runner | None = None
        self.is_held = False
        self.reduced = False
        self.position = -1
        self.waiting = 0
        self.task = NO_BACKWARD
        self.needs = [*self.flats, *self.borrowed]
        self.keeps_between = any(flat.post_forward_mesh is not None for flat in self.flats)
        self._is_lazy = any(not f.group.backend.has_storage for f in self.needs)
        self._hooks = GradientHooks(
            "a hook for when a parameter has got its gradient can't be registered on a parameter that FSDP has "
            "sharded: it keeps no gradient of its own. Register it on the shards that the FSDP module's parameters() "
            "lists, whose gradients are the mean over ranks"
        )
        self._packs: list[GradientPack] = []
        self._replicas: list[Replicas | None] = []  # of each
        self._local = [[LocalGradients(listing) for listing in f.listings] for f in self.flats]
        self._keeps_local = False
        self._trained = [[listing.param.requires_grad for listing in f.listings] for f in self.flats]
        self.is_reached = True
        self.goes_backward = True
        self.is_undecided = False
        self._open_calls = 0
        self.backwards = 0
        self.attach()

    # ------------------------------------------------------------ what is trainable
    def attach(self) -> None:
        """Listens to the gradients of the original parameters that are trainable now."""
        self._hooks.remove()
        ways = [way_for(f, self.replicas, self.reduce, self.divisors) for f in self.flats]
        self._packs = [way.pack for way in ways]
        self._replicas = [way.replicas for way in ways]
        self._fired = [False] * sum(sum(p.trainable) for p in self._packs)
        for flat, pack in zip(self.flats, self._packs, strict=True):
            flat.trains = any(pack.trainable)
        self.waiting = len(self._fired)
        self.has_frozen = any(not all(p.trainable) for p in self._packs) or any(
            not m.param.requires_grad for f in self.borrowed for m in f.originals
        )
        index = 0
        for flat, pack in zip(self.flats, self._packs, strict=True):
            for number, (original, is_trainable) in enumerate(
                zip(flat.originals, pack.trainable, strict=True)
            ):
                if is_trainable:
                    self._hooks.attach(original.param, None, self._after(index, flat, number))
                    index += 1

    def notice_trainable(self) -> bool:
        """Follows what was frozen or unfrozen, in the listed parameters or the original ones; whether any was."""
        changed = False
        for flat, pack, trained in zip(self.flats, self._packs, self._trained, strict=True):
            now = list(map(_requires_grad, flat.listings))
            if now != trained:
                for listing, listed, before in zip(flat.listings, now, trained, strict=True):
                    for original in listing.originals if listed != before else ():
                        original.param.requires_grad_(listed)
            with as_tensors():
                trainable = list(map(_requires_grad, flat.originals))
            if trainable != pack.trainable:
                changed = True
                for k, listing in enumerate(flat.listings):
                    with as_tensors():
                        trains = any(map(_requires_grad, listing.originals))
                    if trains != now[k]:
                        listing.param.requires_grad_(trains)
                        now[k] = trains
            trained[:] = now
        if changed:
            self.attach()
        return changed

    def _after(self, index: int, flat: FlatParam, number: int) -> Callable[[torch.Tensor], None]:
        # one closure a parameter: these run for every gradient
        def after(_: torch.Tensor) -> None:
            engine = self.engine
            if engine is None:
                raise unknown_root(flat, number)
            if flat.store.state is SUMMONED:
                raise backward_when_summoned(flat)
            if engine.state.task == NO_BACKWARD:
                engine.begin_backward()
            if not self._fired[index]:
                self._fired[index] = True
                self.waiting -= 1
                if self.waiting == 0:
                    if self.task in (NO_BACKWARD, current_backward()):
                        engine.complete(self)
                    else:  # a re-entrant checkpoint inside of the module: there may be another one
                        engine.defer(self)

        return after

    # ------------------------------------------------------------ memory
    def start_gather(self) -> None:
        """Asks for the values of everything that the module needs."""
        if not self.is_held:
            self.is_held = True
            after = self.engine.after if self.engine is not None else ()
            with self.ranges.gather():
                for flat in self.needs:
                    flat.start_gather(after)
                if self._is_lazy:
                    gather_together([flat.store for flat in self.needs])

    def finish_gather(self) -> None:
        """Waits for them."""
        for flat in self.needs:
            if flat.store.state is GATHERING:
                flat.store.finish()

    def release(self, until_backward: bool = False) -> None:
        """The module does not need its values any more, or only in backward.

        Raises:
            LifecycleError: somebody wrote to them, which is lost with their memory.
        """
        if self.is_held:
            self.is_held = False
            with self.ranges.reshard():
                for flat in self.needs:
                    flat.release(until_backward)
            for flat in self.needs:
                if flat.written:
                    raise written_original(flat)

    def forget_between(self) -> None:
        """Nothing is kept between forward and backward any more."""
        for flat in self.flats:
            if flat.store.state is KEPT:
                flat.store.forget_kept()

    # ------------------------------------------------------------ backward
    def rename(self, name: str) -> None:
        """Its path in the root module is known."""
        self.name = name
        group = self.group
        values = sum(f.layout.padded_numel * f.compute_dtype.itemsize for f in self.flats)
        gradients = sum(
            p.part_numel * f.group.world_size * packed_dtype(f, self.reduce).itemsize
            for f, p in zip(self.flats, self._packs, strict=True)
            if any(p.trainable)
        )
        self.ranges = UnitRanges(
            name or "root", () if group is None else group.ranks, gather=values, reduce=gradients
        )
        for flat in self.flats:
            flat.ranges, flat.path = self.ranges, name

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Backward reached an output of the module."""
        if self.engine is not None:
            self.engine.reach(self, gradient)

    @property
    def is_entered(self) -> bool:
        """Whether backward is inside of a call whose frozen parameters it needs."""
        return self._open_calls > 0

    def open_call(self) -> None:
        """Backward is inside of one call of the module."""
        self._open_calls += 1

    def close_call(self) -> None:
        """Backward left it."""
        self._open_calls -= 1
        if self._open_calls == 0 and (self.waiting == 0 or self.reduced) and self.engine is not None:
            self.engine.leave(self)

    @property
    def group(self) -> Group | None:
        """Ranks among which it is sharded; None where it needs no parameters."""
        return self.needs[0].group if self.needs else None

    @property
    def is_trainable(self) -> bool:
        """Whether there is anything to reduce."""
        return bool(self._fired)

    @property
    def has_fired(self) -> bool:
        """Whether the backward in progress has given it a gradient."""
        return self.waiting < len(self._fired)

    def send(self) -> None:
        """Starts the reduction of its gradients."""
        self.reduced = True
        with self.ranges.reduce():
            for pack, local in zip(self._packs, self._local, strict=True):
                if any(pack.trainable):
                    kept: dict[int, torch.Tensor] = {}
                    for one in local if self._keeps_local else ():
                        kept.update(one.take())
                    pack.send(kept)
        self._keeps_local = False

    def is_reduced(self) -> bool:
        """Whether :meth:`receive` would not wait."""
        return all(pack.is_done() for pack in self._packs if any(pack.trainable))

    def receive(self) -> None:
        """Waits for the reduction; the shards have their gradients then."""
        for pack, replicas in zip(self._packs, self._replicas, strict=True):
            if any(pack.trainable):
                pack.receive(replicas)

    def forget_errors(self) -> None:
        """What compression has left out of gradients so far is not added to those that come."""
        for pack, replicas in zip(self._packs, self._replicas, strict=True):
            pack.forget_errors()
            if isinstance(replicas, CompressedAllReduce):
                replicas.forget_errors()

    def forget_reduction(self) -> None:
        """Waits for the reduction; the shards get nothing of it."""
        for pack in self._packs:
            pack.forget()

    def note_local_gradients(self) -> None:
        """A backward inside ``no_sync`` has ended."""
        self._keeps_local = True
        for local, pack in zip(self._local, self._packs, strict=True):
            for one in local:
                one.note(pack)

    def widen_local_gradients(self) -> None:
        """Inside ``no_sync``, all gradients of the unit are there: they are kept in the dtype in which they travel."""
        self._keeps_local = True
        for local, pack in zip(self._local, self._packs, strict=True):
            for one in local:
                one.widen(pack.dtype)

    def forget_if_cleared(self) -> None:
        """Before a backward adds to what ``no_sync`` keeps: discards what was cleared meanwhile."""
        for local in self._local if self._keeps_local else ():
            for one in local:
                one.forget_if_cleared()

    def has_local_gradients(self) -> bool:
        """Whether original parameters hold gradients of this rank that were not reduced."""
        if self._keeps_local:
            return any(one.are_there() for local in self._local for one in local)
        with as_tensors():
            for flat in self.flats:
                for m in flat.originals:
                    if m.param.grad is not None:
                        return True
        return False

    def drop_local_gradients(self) -> None:
        """Discards them."""
        for local in self._local:
            for one in local:
                one.drop()
        self._keeps_local = False

    def end_backward(self) -> None:
        """Ready for the next one."""
        if self.is_held:
            self.release()
        if self.keeps_between:
            self.forget_between()
        self.reduced = False
        self.task = NO_BACKWARD
        self._open_calls = 0
        count = len(self._fired)
        self._fired[:] = [False] * count
        self.waiting = count


class UnitCall:
    """One call of a module with frozen parameters.

    The gradients of such a module may all be there while its frozen parameters are still in use: it is needed until
    backward has left the call by all of its inputs. Without an input that needs a gradient, it is needed to the end:
    backward may go on to units below, or to what forward itself made a leaf.
    """

    def __init__(self, unit: Unit, inputs: int) -> None:
        self._unit, self._inputs = unit, inputs
        self._waiting = 0  # inputs that the backward in progress has not left by
        self._task = NO_BACKWARD

    @classmethod
    @not_compiled
    def watching(cls, unit: Unit, inputs: Sequence[torch.Tensor]) -> UnitCall:
        """Watches these inputs."""
        needing = [t for t in inputs if t.requires_grad]
        call = cls(unit, len(needing))
        for t in needing:
            t.register_hook(call._left)
        return call

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Backward reached an output of the call."""
        task = current_backward()
        if task != self._task:  # there may be several backwards through one call
            self._task, self._waiting = task, self._inputs
            self._unit.open_call()
        self._unit.enter_backward(gradient)

    @not_compiled
    def _left(self, _: torch.Tensor) -> None:
        self._waiting -= 1
        if self._waiting == 0 and self._task == current_backward():
            self._unit.close_call()
