"""Steps of optimizers over shards: checked and guarded, and taken by unit in backward (``step_in_backward``).

They have to do what they would do to whole parameters. Before a step their values and states are put aside, and put
back after it (``optimizer_state/kinds.py``); where closures make gradients within a step: after each of them, and
before the next. It costs nothing where all original parameters have gradients.

[Note: first steps] A plain process has parameters where FSDP lists flat parameters. An optimizer notices if it was made
before wrapping (its parameters get no gradients), if it looks at more than one element at a time, or if it was told to
treat matrices in another way: shards have one dimension.

[Note: one step] A rank that leaves a step out, by an error that the program catches, say, would go on with old shards
beside the others' new ones. So ranks say that they step, in the channel that keeps an order: a comparison, in a step
like the last. With it they say what was cleared: a gradient that a backward has left, and that is gone now. Others say
the same, or are in another call.

[Note: local steps] An optimizer that updates every element by itself gives the same results over a DTensor and over its
local rows, and costs a fraction over these: of each operation, DTensor looks for the placements of what comes out. So
from the beginning of such an optimizer's step to its end its groups list ordinary parameters, with the memory, the
gradients and the state of the DTensors. Between steps groups and state are as ever. What comes to be in a step is made
a DTensor at its end.

[Note: steps in backward] Between backward and step a program may read and change all gradients: clip them, unscale
them, skip the step. So at the end of backward the host waits for all of them, and the device has nothing to do while
the optimizer runs. With :func:`~shardkit.step_in_backward` a program says that it does nothing of that. At the end of
backward, where the device still computes what the host has long issued, the host then takes one unit after the other:
it waits for its gradient, runs the optimizer over it, and sends the new values up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..checks import check_same_everywhere, option_facts, some
from ..errors import ConfigurationError, LifecycleError
from ..optimizer_state.forms import check_loaded, mark_state_dicts
from ..optimizer_state.kinds import (
    PutAside,
    UnusedRanges,
    UsedMask,
    counts_steps,
    is_elementwise,
    wrong_count,
)
from ..optimizers.elementwise import Verdict, is_known_elementwise, judge, names_of_elementwise
from ..optimizers.shards import AgreedOptions, copy_options, group_facts, listing_of, shard_behind, take_part
from ..torch_seams.tensors import is_dtensor, like_dtensor
from ..types import AnyCallable, StateDict, Tree
from .flat_param import Registered, dimensions_asked, flat_changed_by
from .originals import managing, name_of_original

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .flat_param import FlatParam


logger = logging.getLogger("shardkit")


class _Looked:
    """Remembers what was seen of an optimizer, and puts aside what its steps leave alone.

    Attributes:
        numbers: of parameters in its groups; None: look again.
        wrapped: how many flat parameters there were.
        listings: what its parameters are listed for, by group of ranks.
        flats: the flat parameters of these.
        whole: those that are listed as they are.
        copied: flat parameters whose shards it changes, on the host, and the device has a copy of.
        options: as all ranks have them.
        is_judged: it may step over shards.
        has_loaded: state, since.
        saved: what was put aside for the step in progress.
        left_out: by label of a flat parameter, the numbers of those in it that had no gradient in some step; None once
            that was warned of.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] | None = None
        self.wrapped = 0
        self.listings: list[list[weakref.ref[Registered]]] = []
        self.flats: list[weakref.ref[FlatParam]] = []
        self.whole: list[weakref.ref[FlatParam]] = []
        self.copied: list[weakref.ref[FlatParam]] = []
        self.options = AgreedOptions()
        self.is_judged = self.has_loaded = False
        self.saved: list[tuple[FlatParam, PutAside]] = []
        self.left_out: dict[str, set[int]] | None = {}

    def look_again(self, _: object) -> None:
        """Notes that it has loaded state."""
        self.numbers, self.has_loaded = None, True

    def put_aside(self, optimizer: Optimizer, flats: Iterable[FlatParam]) -> None:
        for flat in flats:
            unused, param, left_out = flat.unused, flat.param, self.left_out
            are_some = True in unused.originals
            if left_out is not None and unused.is_noted and (are_some or flat.label in left_out):
                self._check_counts(optimizer, flat, left_out.setdefault(flat.label, set()))
            if param.grad is None or param.is_meta:
                continue
            if are_some or unused.used is not None:
                here = [p for p in flat.layout.of_rank(flat.group.rank).values() if unused.originals[p.item]]
                ranges = [(p.offset, p.offset + p.numel) for p in here]
                kept = UnusedRanges(ranges) if unused.used is None else UsedMask(unused.used)
                self.saved.append((flat, PutAside(param.data, optimizer.state.get(param, {}), kept)))

    def put_back(self, optimizer: Optimizer) -> None:
        saved, self.saved = self.saved, []
        for flat, aside in saved:
            aside.put_back(flat.param.data, optimizer.state.get(flat.param, {}))

    def _check_counts(self, optimizer: Optimizer, flat: FlatParam, left_out: set[int]) -> None:
        """Warns, once, of a parameter whose count of steps is not its own; see [Note: counts] in ``kinds.py``."""
        unused, pieces = flat.unused.originals, flat.layout.pieces()
        again = sorted(k for k in left_out if not unused[k])
        stepping = {p.rank for p in pieces if not unused[p.item]}
        left_out.update(p.item for p in pieces if unused[p.item] and p.rank in stepping)
        if not again or len(flat.originals) == 1 or not counts_steps(optimizer):
            return
        self.left_out = None
        text = wrong_count(
            optimizer,
            flat.group,
            f"parameter {name_of_original(flat.originals[again[0]].param)!r}",
            "flat parameter",
            "Shard with shardkit.fully_shard, which leaves each parameter its own count; or wrap what sits out as a "
            "unit of its own, or pass flatten=False (flatten_parameters=False, use_orig_params=True)",
        )
        if flat.reduce.order is not None:  # and not the same on other numbers of ranks
            raise LifecycleError(text)
        logger.warning(text)


class _FirstSteps:
    """Looks again when an optimizer has other parameters or loaded state, or when more modules were wrapped.

    What is a collective depends on the optimizer alone: ranks, which may be threads, wrap at times of their own.

    Attributes:
        wrapped: how often flat parameters were made.
        by_unit: optimizers in whose place others step now over shards that the device has a copy of.
    """

    def __init__(self) -> None:
        self.wrapped = 0
        self.by_unit = weakref.WeakSet[Optimizer]()
        self._looked: weakref.WeakKeyDictionary[Optimizer, _Looked] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer, *, is_due: bool = True) -> None:
        """Looks, and puts aside; with ``is_due=False`` it looks alone, before there are gradients."""
        if (looked := self._looked.get(optimizer)) is None:
            looked = self._looked[optimizer] = _Looked()
        wrapped, now = self.wrapped, tuple([len(g["params"]) for g in optimizer.param_groups])
        if looked.numbers != now or looked.wrapped != wrapped:
            _refuse_originals(optimizer)
            looked.wrapped = wrapped
        if looked.numbers != now:
            _look_at(optimizer, looked)
            looked.numbers = now
        if not is_due:
            return
        for refs in looked.listings:
            listings = [listing for ref in refs if (listing := ref()) is not None]
            if listings:
                looked.options.check(listings[0].group, optimizer.param_groups)
                first = listings[0].flat
                is_in_backward = first.store.landing is not None and first.store.landing.then is not None
                agree_on_step(listings, "" if is_in_backward or first in may_be_skipped else "a step")
        looked.saved = []  # of a step that was refused
        if looked.whole:
            looked.put_aside(optimizer, [flat for ref in looked.whole if (flat := ref()) is not None])

    def after(self, optimizer: Optimizer) -> None:
        """Notes that the step is over, or a closure is about to make other gradients."""
        looked = self._looked.get(optimizer)
        if looked is not None and looked.flats:
            looked.put_back(optimizer)
            looked.options.note(optimizer.param_groups)
            for ref in looked.flats:
                if (flat := ref()) is not None:
                    flat.unused.is_noted = False
        for ref in () if looked is None else looked.copied:
            if (flat := ref()) is not None:
                flat.store.renew(flat.trains and optimizer not in self.by_unit)


def _look_at(optimizer: Optimizer, looked: _Looked) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    listed = [listing for listing in map(listing_of, params) if listing is not None]
    cut = [
        f
        for f in listed  # whose shard is not one of the parameters as it is
        if f.group.world_size > 1 or len(f.originals) > 1 or f.param.shape != f.originals[0].shape
    ]
    is_new = not looked.is_judged and bool(cut)
    if is_new or looked.has_loaded:
        check_loaded(optimizer, listed)
        looked.has_loaded = False
    if listed and not looked.flats:
        _refuse_differences(optimizer, listed)
    if is_new:
        if any(shard_behind(listing.param) is not None for listing in cut):  # no DTensors
            _refuse_coupled(optimizer)
        _warn_of_groups_by_dimension(optimizer)
        mark_state_dicts(optimizer, looked.look_again)
        looked.is_judged = True
    by_ranks: dict[tuple[int, ...], list[weakref.ref[Registered]]] = {}
    for listing in listed:
        by_ranks.setdefault(listing.group.ranks, []).append(weakref.ref(listing))
    looked.listings = [*by_ranks.values()]
    flats = {id(listing.flat): listing.flat for listing in listed}.values()
    looked.flats = [*map(weakref.ref, flats)]
    looked.whole = [weakref.ref(flat) for flat in flats if any(flat is listing for listing in listed)]
    changed = dict.fromkeys(flat for flat in map(flat_changed_by, params) if flat is not None)
    looked.copied = [weakref.ref(flat) for flat in changed if flat.offloaded is not None]


first_steps = _FirstSteps()


@functools.cache
def watch_steps() -> None:
    """Looks at optimizers before their steps from now on."""
    take_part(first_steps)
    if torch.optim.Muon.__init__ is not _make_muon:
        torch.optim.Muon.__init__ = _make_muon  # type: ignore[method-assign]


_of_torch: AnyCallable = torch.optim.Muon.__init__


@functools.wraps(_of_torch)
def _make_muon(self: Optimizer, params: Iterable[object], *args: object, **kwargs: object) -> None:
    """Makes torch's Muon, which looks at shapes right then, before there is a step to look at."""
    params = [*params]
    try:
        _of_torch(self, params, *args, **kwargs)
    except ValueError as error:
        if any(isinstance(p, torch.Tensor) and shard_behind(p) is not None for p in tree_leaves(params)):
            raise _coupled("Muon") from error
        raise


def _refuse_originals(optimizer: Optimizer) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    originals = [p for p in params if managing(p) is not None and shard_behind(p) is None]
    if originals:
        names = some(repr(name_of_original(p)) for p in originals)
        raise LifecycleError(
            f"{len(originals)} of the {len(params)} parameters of this {type(optimizer).__name__} were taken over by "
            f"FSDP modules after it was made ({names}): it would never change "
            "them. Make the optimizer after wrapping, from the wrapped model's parameters()"
        )


def _refuse_differences(optimizer: Optimizer, listed: list[Registered]) -> None:
    """Refuses optimizers or options that differ between ranks, which step parts of one flat parameter (collective)."""
    facts = [*option_facts(optimizer=type(optimizer).__name__), *group_facts(optimizer.param_groups, 0)]
    placed = [(f, n) for n, g in enumerate(optimizer.param_groups) for f in map(listing_of, g["params"])]
    for ranks in {f.group.ranks: f.group for f in listed}.values():
        params = sorted(
            (f"parameter {name_of_original(f.originals[0].param)!r}", f"in group {n}")
            for f, n in placed
            if f is not None and f.group.ranks == ranks.ranks
        )
        check_same_everywhere(ranks, [*facts, *params], "optimizers over the shards of one model")


def agree_on_step(listings: Sequence[Registered], what: str, others: Iterable[str] = ()) -> None:
    """Tells other ranks that this one steps, and what it has cleared; see [Note: one step].

    Args:
        what: steps; "": nothing that ranks come to in one order, so that they tell only what they have cleared.
        others: what else was cleared.

    Raises:
        OutOfStepError: another rank's program does not step now, or has not cleared the same gradients.
    """
    cleared = [*others]
    for listing in listings:
        if listing.has_loaded and what:
            listing.has_loaded, what = False, "a step after load_state_dict() of the model"
        if listing.param.grad is None and listing.flat.unused.is_noted:
            unused, flat = listing.flat.unused.originals, listing.flat
            mine = range(listing.first, listing.first + len(listing.originals))
            here = flat.layout.of_rank(flat.group.rank).keys() & mine
            if any(not unused[k] for k in here or mine):
                cleared.append(listing.label)
    if cleared:
        what = f"{what or 'a step'} without the gradients of {', '.join(cleared)}"
    if what:
        listings[0].group.channel("parameters").agree(what)


def _refuse_coupled(optimizer: Optimizer) -> None:
    verdict, name = judge(optimizer), type(optimizer).__name__
    if verdict is Verdict.COUPLED:
        raise _coupled(name)
    if verdict is Verdict.UNKNOWN:
        untried = (
            "be tried for whether it updates every element by itself, which it has to over FSDP's shards; if it does, "
            f"say so: shardkit.declare_elementwise({name})"
        )
        if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            raise ConfigurationError(f"{name} goes around another optimizer, and can't {untried}")
        logger.warning("%s could not %s", name, untried)


def _coupled(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} updates elements of a parameter together, and FSDP's shards are parts of flat parameters: its "
        "steps would be others than without sharding. Take an optimizer that updates every element by itself "
        f"(torch's {names_of_elementwise()}; any other is tried), or give it whole parameters: "
        f"shardkit.WholeParameters(model, {name}, ...), or ShardedDDP(model, OSS(model.parameters(), "
        f"optim={name})). If this is mistaken: shardkit.declare_elementwise({name})"
    )


def _warn_of_groups_by_dimension(optimizer: Optimizer) -> None:
    """Groups made by ``p.ndim`` put all shards of one dimension with the biases, and nothing decays.

    The group that was meant to decay is empty. Where it was left out because it is, the program has asked shards for
    their dimensions; a schedule that begins without decay has no reason to. Parts that are listed one by one as vectors
    are ordinary parameters, of which nobody knows: there, groups without decay differ from what the optimizer says.
    """
    groups, decays = optimizer.param_groups, optimizer.defaults.get("weight_decay")
    decaying = [g for g in groups if g.get("weight_decay")]
    is_empty = any(not g["params"] for g in decaying)
    undecayed = [f for g in groups if not g.get("weight_decay") for f in map(shard_behind, g["params"]) if f]
    matrices = [
        name
        for f in undecayed
        if is_empty or f in dimensions_asked or (decays and not decaying and f is not f.flat)
        for name, m in zip(f.names, f.originals, strict=True)
        if len(m.shape) > 1 and len(f.param.shape) < 2
    ]
    if matrices:
        logger.warning(
            "%s does not decay shards with matrices in them (%s, ...), and groups go by p.ndim, or one is empty. "
            "Shards of flat parameters have one dimension: take fully_shard, which lists rows of each parameter with "
            "its own dimensions; or note the names of what is to decay before wrapping, wrap with flatten=False "
            "(fairscale's flatten_parameters=False) and choose by name. If nothing is to decay, pass weight_decay=0",
            type(optimizer).__name__,
            matrices[0],
        )


# Of torch: the one asks for losses of all ranks, the other DTensor can't compute.
_NAMED = ("LBFGS", "Adafactor")


# In a step: the DTensor, what is updated in its place, and the DTensor's state before, by key.
_Lent = tuple["DTensor", nn.Parameter, StateDict]


class _LocalSteps:
    """Takes part in steps; see the note."""

    def __init__(self) -> None:
        self._lists: weakref.WeakKeyDictionary[Optimizer, list[list[Tree]]] = weakref.WeakKeyDictionary()
        self._lent: weakref.WeakKeyDictionary[Optimizer, list[_Lent]] = weakref.WeakKeyDictionary()
        self._locals: weakref.WeakKeyDictionary[Optimizer, dict[int, nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        one_of_each = {type(p): p for g in groups for p in g["params"]}
        # not asked of each: a call a parameter
        kinds = {kind for kind, p in one_of_each.items() if is_dtensor(p)}
        if not kinds:
            return
        listed = [p for g in groups for p in g["params"] if type(p) in kinds]
        ours = {listing_of(p) is not None for p in listed}
        if True not in ours:
            return
        name = type(optimizer).__name__
        if name in _NAMED:
            raise ConfigurationError(
                f"{name} looks at more than one element at a time, and at the loss, of which a rank knows its part: "
                f"over shards its steps would not be those of one process. Use shardkit.WholeParameters(model, "
                f"torch.optim.{name}, ...)"
            )
        if False in ours or not is_known_elementwise(type(optimizer)):
            return  # gradients of others' DTensors may be sums that are not made yet
        if any(hasattr(kind, "fsdp_pre_all_gather") for kind in {type(p._local_tensor) for p in listed}):
            return  # their classes compute with DTensors as FSDP2 does
        self._lists[optimizer] = [g["params"] for g in groups]
        lent = self._lent[optimizer] = []
        made = self._locals.setdefault(optimizer, {})
        state: Tree = optimizer.state
        for g in groups:
            g["params"] = [self._lend(p, state, made, lent) if type(p) in kinds else p for p in g["params"]]

    @staticmethod
    def _lend(p: Tree, state: Tree, made: dict[int, nn.Parameter], lent: list[_Lent]) -> nn.Parameter:
        memory, gradient = p._local_tensor, p.grad
        local = made.get(id(p))
        if local is None or local.data_ptr() != memory.data_ptr() or local.shape != memory.shape:
            local = made[id(p)] = nn.Parameter(memory.detach(), requires_grad=p.requires_grad)
        local.grad = None if gradient is None else gradient._local_tensor
        own, kind = state.pop(p, {}), type(p)
        if own:
            state[local] = {k: v._local_tensor if type(v) is kind else v for k, v in own.items()}
        lent.append((p, local, own))  # plain, for a named one costs a call
        return local

    def after(self, optimizer: Optimizer) -> None:
        if (lists := self._lists.pop(optimizer, None)) is None:
            return
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        state: Tree = optimizer.state
        for listed, local, before in self._lent.pop(optimizer):
            local.grad = None
            if (now := state.pop(local, None)) is not None:
                state[listed] = _returned(listed, local, before, now)


def _returned(listed: DTensor, local: nn.Parameter, before: StateDict, now: StateDict) -> StateDict:
    found: StateDict = {}
    for key, value in now.items():
        old = before.get(key)
        if type(old) is type(listed) and old._local_tensor is value:
            found[key] = old
        elif is_elementwise(key, value, local.shape):
            found[key] = like_dtensor(value, listed)
        else:
            found[key] = value
    return found


local_steps = _LocalSteps()


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
    # made for others than it lists by now, or those are elsewhere
    if (
        steps is None
        or steps.listed != _listed(optimizer)
        or any(f.store.landing is None for f in steps.parts)
    ):
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

    So whatever looks at the steps of an optimizer over shards looks at these.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not is_known_elementwise(type(optimizer)):
            raise ConfigurationError(
                f"step_in_backward: {type(optimizer).__name__} may look at more than one parameter, or at what is not "
                f"there before backward ends; it is for torch's {names_of_elementwise()}. Call step() after backward; "
                "if it updates every element by itself: shardkit.declare_elementwise"
            )
        self.listed = _listed(optimizer)
        are_there = False
        found: dict[FlatParam, list[list[nn.Parameter]]] = {}  # by what they are of, of each group
        for k, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                listing = listing_of(param)
                if listing is not None and listing.flat.offloaded is not None:
                    are_there = True
                    if listing.flat.store.landing is not None:
                        found.setdefault(listing.flat, [[] for _ in self.listed])[k].append(param)
        self.parts = {flat: _part_of(optimizer, params) for flat, params in found.items()}
        self._stepped: set[FlatParam] = set()
        self._thread = 0  # that runs the block; backward may run in others
        if not are_there:  # else one rank that has all of them may need no copy
            raise ConfigurationError(
                "step_in_backward: the optimizer lists no shards on the host that the device has a copy of; shard with "
                "offload=OffloadPolicy(masters=True), or call step() after backward"
            )
        if any(flat.reduce.order is not None for flat in self.parts):
            raise ConfigurationError(
                'step_in_backward with ReducePolicy(order="fixed"): a step waits for other micro-batches there; call '
                "step() after the last one"
            )

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
        for flat, part in self.parts.items():
            part.state = optimizer.state
            copy_options(optimizer.param_groups, part.param_groups)
            if (landing := flat.store.landing) is not None:
                landing.then = functools.partial(self._step, flat)

    def end(self, optimizer: Optimizer) -> None:
        """Gives gradients back to the program."""
        first_steps.by_unit.discard(optimizer)
        for flat in self.parts:
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
        part = self.parts[flat]
        part.step()
        part.zero_grad()

    def _refuse_skipping(self) -> None:
        if not may_be_skipped.isdisjoint(self.parts):
            raise LifecycleError(
                "step_in_backward inside of SkipOutOfMemory: a unit's step could not be taken back where a rank runs "
                "out of memory later in this backward. Call step() behind the with of SkipOutOfMemory"
            )

    def _refuse_scaled(self) -> None:
        if (scaler := _scaling.get(self._thread, lambda: None)()) is not None:
            raise LifecycleError(
                f"step_in_backward with a loss that {type(scaler).__name__}.scale() has scaled, without an update() "
                "since: gradients have to be unscaled before a step. Call step() after backward, outside"
            )

    def step_rest(self, optimizer: Optimizer) -> None:
        """Steps what is sharded otherwise or not at all, and what this backward did not reach."""
        self._refuse_scaled()
        for flat in self.parts:
            if flat not in self._stepped:
                self._step(flat)
        optimizer.step()  # over what has a gradient still
        optimizer.zero_grad()


_steps: weakref.WeakKeyDictionary[Optimizer, _StepsByUnit] = weakref.WeakKeyDictionary()
may_be_skipped: set[FlatParam] = set()  # by batches that are not through yet
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
