"""One module's share in the engine: what it needs gathered, and how far its backward has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from ..backend import Group, not_compiled
from ..errors import ConfigurationError, LifecycleError
from ..layout import buckets_by_size
from ..policy import ReducePolicy
from ..reduction.ordered import Rounds, microbatches, refuse_other
from ..torch_seams.hooks import NO_BACKWARD, GradientHooks, after_backward, current_backward
from ..tracing.ranges import UNNAMED, Ranges
from .flat_param import FlatParam
from .gradients import OWN, CustomComms, GradientPack, LocalGradients, StoredPack, pack_for, sent_by
from .originals import as_tensors, backward_when_summoned, name_of_original, written_original
from .store import KEPT, SUMMONED, Store, start_together

if TYPE_CHECKING:
    from .engine import Engine


_requires_grad = attrgetter("param.requires_grad")


class Unit:
    """The flat parameters of one wrapped module.

    Attributes:
        comms: messages that are sent otherwise.
        name: path of the wrapper in the root module.
        ranges: what it does, in traces.
        flats: flat parameters that this unit owns.
        borrowed: those of other units with weights that this unit's module uses too.
        needs: both.
        keeps_between: a mesh of ranks keeps its values from forward to backward.
        keep_after_forward: stays gathered between forward and backward.
        keep_after_backward: stays gathered between backward and the next forward, unless shards change.
        keeps_frozen: what it has of parameters that are not trained stays gathered, unless shards change.
        accumulates: its gradients stay this rank's own, as in ``no_sync``.
        doors: how many modules are called, which are one unit together.
        left: of these, calls that the forward in progress has left.
        gathered_at: version of the shards whose values may be used longer than for a step; None where none may.
        engine: runs the unit; the root's.
        enter_backward: called where backward reaches an output of the module, with the gradient.
        is_held: gathered on behalf of this unit.
        fired: which of its trainable parameters the backward in progress has given a gradient.
        reduced: its gradients were sent in this backward.
        packs: reduce the gradients of each of its flat parameters; made with the engine.
        sent: those of them that have something to send.
        position: place in the order of backward; -1 where it has none.
        is_reached: backward may go through its last forward on this rank, as far as forward tells.
        goes_backward: it may on some rank: the unit is gathered for backward.
        began: what autograd counted when its last forward began.
        is_undecided: ranks have not heard from each other whether it is gathered for backward.
        has_frozen: some of what it needs is not trainable.
        open_calls: with frozen parameters, that backward is inside of: it needs these.
        keeps_local: there may be gradients that ``no_sync`` keeps.
        task: the backward that has reached its outputs last.
        backwards: of a root's unit, how many have gone through it.
    """

    comms: CustomComms = OWN

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
        self.ranges: Ranges = UNNAMED
        self.keep_after_forward = keep_after_forward
        self.keep_after_backward = self.accumulates = self.keeps_frozen = False
        self.doors, self.left = 1, 0
        self.gathered_at: int | None = None
        self.reduce = reduce
        self.divisors = divisors
        self.replicas = replicas
        self.engine: Engine | None = None
        self.enter_backward: Callable[[torch.Tensor], None]
        self.is_held = False
        self.reduced = False
        self.position = -1
        self.waiting = 0
        self.task = NO_BACKWARD
        self._hooks = GradientHooks(
            "a hook for when a parameter has got its gradient can't be registered on a parameter that FSDP has "
            "sharded: it keeps no gradient of its own. Register it on the shards that the FSDP module's parameters() "
            "lists, whose gradients are the mean over ranks"
        )
        self.packs: list[GradientPack] = []
        self.fired: list[bool] = []
        self.sent: list[GradientPack] = []
        self._local: list[list[LocalGradients]] = []  # of each, as soon as there are any
        self.keeps_local = False
        self.is_reached, self.began = True, 0
        self.goes_backward = True
        self.is_undecided = False
        self.open_calls = 0
        self.backwards = 0
        self.take(flats, borrowed)

    def take(self, flats: Sequence[FlatParam], borrowed: Sequence[FlatParam]) -> None:
        """Makes these what it owns, and what it uses of others; nobody has run it yet."""
        self.flats, self.borrowed = list(flats), list(borrowed)
        self.needs = [*self.flats, *self.borrowed]
        self.keeps_between = self._is_lazy = False
        for flat in self.needs:
            self._is_lazy |= not flat.group.backend.has_storage
        self._trained: list[list[bool]] = []
        for flat in self.flats:
            self._trained.append(list(map(_requires_grad, flat.listings)))
            self.keeps_between |= flat.post_forward_mesh is not None
        self.attach()

    def divide(self, before: float, after: float) -> None:
        """Divides gradients by the one before and by the other after their sum over ranks."""
        refuse_other(self.reduce, "other divisors than the number of micro-batches")
        self.divisors = before, after
        self.attach()

    def send_through(self, comms: CustomComms) -> None:
        """Sends its messages so from now on; between steps."""
        self.comms = comms
        if self.engine is not None and comms.are_custom:
            self.engine.needs_one_order = True
        over = None
        if comms.gather is not None and self.flats:  # one for all of them, which travel together
            channel = self.flats[0].group.channel("parameters")
            over = sent_by(comms.gather, channel, comms.process_group)
        for flat in self.flats:
            flat.gathers_over = over
            flat.store.send_over(over)
        self.attach()

    # ------------------------------------------------------------ what is trainable
    def attach(self) -> None:
        """Listens to the gradients of the original parameters that are trainable now."""
        if self.fired:
            self._hooks.remove()
        self.fired, self.has_frozen = [], False
        with as_tensors():
            for flat in self.borrowed:
                self.has_frozen = self.has_frozen or False in map(_requires_grad, flat.originals)
            for flat in self.flats:
                # all ranks connect it here, whichever root each of them calls first
                flat.group.channel("gradients")
                flat.trainable = trainable = list(map(_requires_grad, flat.originals))
                flat.trains, flat.reduce = True in trainable, self.reduce
                self.has_frozen = self.has_frozen or False in trainable
                for number in compress(range(len(trainable)), trainable):
                    after = self._after(len(self.fired), flat, number)
                    self._hooks.attach(flat.originals[number].param, None, after)
                    self.fired.append(False)
        self.waiting = len(self.fired)
        if self.engine is not None:
            self.run_by(self.engine)

    def run_by(self, engine: Engine) -> None:
        """Makes what reduces its gradients, which :attr:`engine` begins; again where it has changed."""
        self.engine, self.enter_backward = engine, partial(engine.reach, self)
        terms = self.replicas, self.reduce, self.divisors, self.comms
        # for training, also where the first forward is an evaluation
        with torch.inference_mode(False):
            self.packs = [pack_for(flat, *terms) for flat in self.flats]
        self.sent = [pack for pack in self.packs if pack.trains]

    def notice_trainable(self) -> bool:
        """Follows what was frozen or unfrozen, in the listed parameters or the original ones; whether any was."""
        changed = False
        for flat, trained in zip(self.flats, self._trained, strict=True):
            now = list(map(_requires_grad, flat.listings))
            if now != trained:
                for listing, listed, before in zip(flat.listings, now, trained, strict=True):
                    for original in listing.originals if listed != before else ():
                        original.param.requires_grad_(listed)
            with as_tensors():
                trainable = list(map(_requires_grad, flat.originals))
            if trainable != flat.trainable:
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
                name = name_of_original(flat.originals[number].param)
                raise LifecycleError(
                    f"rank {flat.group.rank}: backward reached parameter {name!r}, but the FSDP module that holds it "
                    "was never called; call the FSDP module, not what it wraps, or its shards get no gradients"
                )
            if flat.store.state is SUMMONED:
                raise backward_when_summoned(flat)
            if engine.state.task == NO_BACKWARD:
                engine.begin_backward(by_gradient=True)
            if not self.fired[index]:
                self.fired[index] = True
                self.waiting -= 1
                if self.waiting == 0:
                    if self.task in (NO_BACKWARD, current_backward()):
                        engine.complete(self)
                    else:  # a re-entrant checkpoint inside of the module: there may be another one
                        engine.deferred.append(self)

        return after

    # ------------------------------------------------------------ memory
    def start_gather(self, together: list[Store] | None = None) -> None:
        """Asks for the values of everything that the module needs.

        Args:
            together: gets the stores that are to be started, with those of other units; else they are started.
        """
        if self.is_held:
            return
        self.is_held = True
        self.gathered_at = self._version() if self.keep_after_backward or self.doors > 1 else None
        asked: list[Store] = [] if together is None else together
        after = self.engine.after if self.engine is not None else ()
        with self.ranges.gather():
            for flat in self.needs:
                store = flat.use()
                if store is not None:
                    asked.append(store)
            if self.keeps_frozen:
                for flat in self.flats:
                    flat.keep()
            if together is not None:
                return
            if len(asked) == 1 and not self._is_lazy:
                asked[0].start(after)
            else:
                start_together(asked, after)

    def release(self, until_backward: bool = False) -> None:
        """Notes that the module does not need its values any more, or only in backward.

        Raises:
            LifecycleError: somebody wrote to them, which is lost with their memory.
        """
        if self.is_held:
            self.is_held = False
            with self.ranges.reshard():
                for flat in self.needs:
                    store = flat.store
                    store.users -= 1
                    if store.users <= 0:
                        store.release(until_backward)
            for flat in self.needs:
                if flat.written:
                    raise written_original(flat)

    def give_back_frozen(self, outdated: bool = False) -> None:
        """Frees frozen values that were kept; with ``outdated`` those that are not the shards' any more."""
        for flat in self.flats:
            if flat.kept_at is not None and (not outdated or flat.is_outdated):
                self.release()  # else it would be taken for gathered
                flat.drop()

    def is_current(self) -> bool:
        """Whether what it holds is what the shards have."""
        return self.gathered_at == self._version() and all(
            flat.shards is None or flat.shards.are_views() for flat in self.needs
        )

    def _version(self) -> int:
        return sum(flat.version for flat in self.needs)

    def forget_between(self) -> None:
        """Keeps nothing between forward and backward any more."""
        for flat in self.flats:
            if flat.store.state is KEPT:
                flat.store.forget_kept()

    # ------------------------------------------------------------ backward
    def rename(self, paths: Sequence[str]) -> None:
        """Notes that the paths of its modules in the root module are known."""
        self.name = name = paths[0]
        group = self.group
        values = sum(f.layout.padded_numel * f.compute_dtype.itemsize for f in self.flats)
        gradients = sum(pack.nbytes for pack in self.sent)
        self.ranges = Ranges(
            name or "root", () if group is None else group.ranks, gather=values, reduce=gradients
        )
        for flat in self.flats:
            flat.ranges, flat.paths = self.ranges, list(paths)

    @property
    def small_bytes(self) -> int:
        """Counts the bytes of its values, gathered, where they can travel with those of other units; else -1."""
        if any(flat.store.joins is None or flat.is_borrowed or flat.on_gather for flat in self.needs):
            return -1
        return sum(flat.layout.padded_numel * flat.compute_dtype.itemsize for flat in self.needs)

    @property
    def group(self) -> Group | None:
        """Returns the ranks among which it is sharded; None where it needs no parameters."""
        return self.needs[0].group if self.needs else None

    @property
    def is_trainable(self) -> bool:
        """Whether there is anything to reduce."""
        return bool(self.fired)

    def send(self, together: list[torch.Tensor | None] | None = None) -> None:
        """Starts the reduction of its gradients.

        Args:
            together: gets them, to be sent with those of other units; else they are sent.
        """
        self.reduced = True
        with self.ranges.reduce():
            for k, pack in enumerate(self.packs):
                if pack.trains:
                    kept: dict[int, torch.Tensor] = {}
                    for one in self._local[k] if self.keeps_local else ():
                        kept.update(one.take())
                    gradients = pack.take(kept)
                    if together is None:
                        pack.in_flight = pack.reduce(gradients)
                    else:
                        together += gradients
        self.keeps_local = False

    def forget_errors(self) -> None:
        """Drops what compression has left out of gradients so far."""
        for pack in self.packs:
            pack.forget_errors()

    def local_gradients(self) -> Iterator[tuple[LocalGradients, GradientPack]]:
        """Yields what ``no_sync`` keeps for each registered parameter, and what would reduce it."""
        self.keeps_local = True
        if not self._local:
            self._local = [[LocalGradients(listing) for listing in f.listings] for f in self.flats]
        for local, pack in zip(self._local, self.packs, strict=True):
            for one in local:
                yield one, pack

    def forget_if_cleared(self) -> None:
        """Discards what was cleared meanwhile, before a backward adds to what ``no_sync`` keeps."""
        for local in self._local if self.keeps_local else ():
            for one in local:
                one.forget_if_cleared()

    def has_local_gradients(self) -> bool:
        """Whether original parameters hold gradients of this rank that were not reduced."""
        if self.keeps_local:
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
        self.keeps_local = False
        with as_tensors():
            for flat in self.flats:
                for m in flat.originals:
                    m.param.grad = None

    def end_backward(self) -> None:
        """Gets ready for the next one."""
        if self.is_held and not self.keep_after_backward:
            self.release()
        if self.keeps_between:
            self.forget_between()
        self.reduced = False
        self.task = NO_BACKWARD
        self.open_calls = 0
        count = len(self.fired)
        self.fired[:] = [False] * count
        self.waiting = count


def rounds_of(units: Sequence[Unit]) -> Rounds | None:
    """Counts the backwards of a step through these units, where the order of sums is fixed.

    Raises:
        ConfigurationError: it is not the same for all of them.
    """
    trained = [unit for unit in units if unit.flats]
    ranks = [
        u.flats[0].group.world_size * (1 if u.replicas is None else u.replicas.world_size) for u in trained
    ]
    counts = {(microbatches(u.reduce, w), w) for u, w in zip(trained, ranks, strict=True)}
    if all(count == 0 for count, _ in counts):
        return None
    if len(counts) > 1:
        raise ConfigurationError(
            'order="fixed" and microbatches= have to be the same for all units of a model, over the same ranks: '
            f"there are {sorted(counts)} as (micro-batches, ranks)"
        )
    [(count, world_size)] = counts
    params = [listing.param for unit in trained for flat in unit.flats for listing in flat.listings]
    return Rounds(params, count, world_size)


ROW = 2**16  # bytes that one message brings for several units


class SmallUnits:
    """Units in a row whose gradients travel as one message; of them as of a :class:`Unit`, what the engine asks."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.flats = [flat for unit in units for flat in unit.flats]
        self.sent: Sequence[GradientPack] = ()
        self._packs: list[GradientPack] = []  # of the units, in place of which the joined one is
        self._joined: StoredPack | None = None

    @property
    def accumulates(self) -> bool:
        """Whether all of them keep their gradients."""
        return all(unit.accumulates for unit in self.units)

    @property
    def waiting(self) -> int:
        """Counts the gradients that are missing of those that are to be sent."""
        return sum([unit.waiting for unit in self.units if not unit.accumulates])

    def send(self) -> None:
        """Starts the reduction of their gradients."""
        packs = [pack for unit in self.units for pack in unit.sent]
        if packs != self._packs:
            stored, kinds, _ = joinable(self.units)
            self._packs, self._joined = packs, stored[0].joined(stored[1:]) if len(kinds) == 1 else None
        units = [unit for unit in self.units if not unit.accumulates]
        if self._joined is None or len(units) < len(self.units):
            # one of them has got another kind since the plan was made, or keeps its gradients
            self.sent = [pack for unit in units for pack in unit.sent]
            for unit in units:
                unit.send()
            return
        gradients: list[torch.Tensor | None] = []
        for unit in units:
            unit.send(gradients)
        self.sent = (self._joined,)
        self._joined.in_flight = self._joined.reduce(gradients)


def joinable(units: Sequence[Unit]) -> tuple[list[StoredPack], set[object], int]:
    """Returns what reduces the gradients of these units, their kinds (one, if they can travel together), and bytes."""
    packs = [pack for unit in units for pack in unit.sent]
    stored = [pack for pack in packs if type(pack) is StoredPack]
    alone = len(stored) < len(packs) or any(
        unit.replicas is not None or unit.comms.hook is not None for unit in units
    )
    kinds = set() if alone else {pack.joins for pack in stored}
    return stored, kinds, sum([pack.nbytes for pack in stored])


def rows_of_small(units: Sequence[Unit]) -> list[Unit | SmallUnits]:
    """Returns units in order, those together whose gradients are small and can travel as one message."""
    found = [joinable([unit])[1:] for unit in units]
    kinds = [next(iter(kinds)) if len(kinds) == 1 else None for kinds, _ in found]
    rows = [[units[k] for k in row] for row in buckets_by_size([size for _, size in found], ROW, kinds)]
    return [row[0] if len(row) == 1 else SmallUnits(row) for row in rows]


class UnitCall:
    """One call of a module with frozen parameters.

    The gradients of such a module may all be there while its frozen parameters are still in use: it is needed until
    backward has left the call by all of its inputs. Without an input that needs a gradient, it is needed to the end:
    backward may go on to units below, or to what forward itself made a leaf. So it may where an input is a leaf, whose
    gradient autograd computes first; in a re-entrant checkpoint the end is that of the inner backward.
    """

    @not_compiled
    def __init__(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        needing = [t for t in inputs if t.requires_grad]
        self._unit, self._inputs, self._at_end = unit, len(needing), any(t.is_leaf for t in needing)
        self._waiting = 0  # inputs that the backward in progress has not left by
        self._task = NO_BACKWARD
        for t in needing:
            t.register_hook(self._left)

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor) -> None:
        """Notes that backward reached an output of the call."""
        task = current_backward()
        if task != self._task:  # there may be several backwards through one call
            self._task, self._waiting = task, self._inputs
            self._unit.open_calls += 1
        self._unit.enter_backward(gradient)

    @not_compiled
    def _left(self, _: torch.Tensor) -> None:
        self._waiting -= 1
        if self._waiting == 0 and self._task == current_backward():
            if not self._at_end:
                self._leave()
            elif (engine := self._unit.engine) is not None and engine.state.task != self._task:
                after_backward(self._leave)

    def _leave(self) -> None:
        unit = self._unit
        unit.open_calls -= 1
        if unit.open_calls == 0 and (unit.waiting == 0 or unit.reduced) and unit.engine is not None:
            unit.engine.leave(unit)
