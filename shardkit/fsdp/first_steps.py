"""Looks at each optimizer before its first step: would it do to parameters what it does to shards?

A plain process has parameters where FSDP lists flat parameters. An optimizer notices if it was made before wrapping
(its parameters get no gradients), if it looks at more than one element at a time, or if it was told to treat matrices
in another way: shards have one dimension.

[Note: cleared] Before every step one thing is looked at: a gradient that a backward has left, and that is gone now, was
cleared by the program. If one rank alone did that, ranks' parts of a flat parameter would go apart. So a rank says what
is gone before it steps. Others say the same, or are in another call.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..checks import AgreedOptions, check_same_everywhere, group_facts, option_facts
from ..errors import ConfigurationError, LifecycleError
from ..optimizer_state.marking import check_loaded, mark_state_dicts
from ..optimizers.elementwise import Verdict, judge, names_of_elementwise
from ..optimizers.shards import shard_behind
from ..optimizers.stepping import take_part
from ..types import AnyCallable
from .originals import FlatParamLike, Listing, managing, name_of_original
from .registered_shard import dimensions_asked, listing_of
from .skipping import Skips

logger = logging.getLogger("shardkit")


class _Looked:
    """What was seen of an optimizer.

    Attributes:
        numbers: of parameters in its groups; None: look again.
        wrapped: how many flat parameters there were.
        listings: what its parameters are listed for, by group of ranks.
        flats: the flat parameters of these.
        whole: those that are listed as they are.
        options: as all ranks have them.
        skips: what its steps leave alone.
        is_judged: it may step over shards.
        has_loaded: state, since.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] | None = None
        self.wrapped = 0
        self.listings: list[list[weakref.ref[Listing]]] = []
        self.flats: list[weakref.ref[FlatParamLike]] = []
        self.whole: list[weakref.ref[FlatParamLike]] = []
        self.options, self.skips = AgreedOptions(), Skips()
        self.is_judged = self.has_loaded = False

    def look_again(self, _: object) -> None:
        """It has loaded state."""
        self.numbers, self.has_loaded = None, True


class _FirstSteps:
    """Looks again when an optimizer has other parameters or loaded state, or when more modules were wrapped.

    What is a collective depends on the optimizer alone: ranks, which may be threads, wrap at times of their own.
    """

    def __init__(self) -> None:
        self.wrapped = 0
        self._looked: weakref.WeakKeyDictionary[Optimizer, _Looked] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer) -> None:
        looked = self._looked.get(optimizer)
        if looked is None:
            looked = self._looked[optimizer] = _Looked()
        wrapped, now = self.wrapped, tuple([len(g["params"]) for g in optimizer.param_groups])
        if looked.numbers != now or looked.wrapped != wrapped:
            _refuse_originals(optimizer)
            looked.wrapped = wrapped
        if looked.numbers != now:
            _look_at(optimizer, looked)
            looked.numbers = now
        for refs in looked.listings:
            listings = [listing for ref in refs if (listing := ref()) is not None]
            if listings:
                looked.options.check(listings[0].group, optimizer.param_groups)
                _agree_on_cleared(listings)
        looked.skips.saved = []  # of a step that was refused
        if looked.whole:
            looked.skips.put_aside(optimizer, [flat for ref in looked.whole if (flat := ref()) is not None])

    def after(self, optimizer: Optimizer) -> None:
        """The step is over, or a closure is about to make other gradients."""
        looked = self._looked.get(optimizer)
        if looked is not None and looked.flats:
            looked.skips.put_back(optimizer)
            looked.options.note(optimizer.param_groups)
            for ref in looked.flats:
                flat = ref()
                if flat is not None:
                    flat.unused.is_noted = False


def _look_at(optimizer: Optimizer, looked: _Looked) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    listed = [listing for listing in map(listing_of, params) if listing is not None]
    shards = [listing for listing in listed if shard_behind(listing.param) is not None]  # no DTensors
    is_new = not looked.is_judged and any(map(_is_cut, shards))
    if is_new or looked.has_loaded:
        check_loaded(optimizer, shards)
        looked.has_loaded = False
    if listed and not looked.flats:
        _refuse_differences(optimizer, listed)
    if is_new:
        _refuse_coupled(optimizer)
        _warn_of_groups_by_dimension(optimizer)
        mark_state_dicts(optimizer, looked.look_again)
        looked.is_judged = True
    by_ranks: dict[tuple[int, ...], list[weakref.ref[Listing]]] = {}
    for listing in listed:
        by_ranks.setdefault(listing.group.ranks, []).append(weakref.ref(listing))
    looked.listings = [*by_ranks.values()]
    flats = {id(listing.flat): listing.flat for listing in listed}.values()
    looked.flats = [*map(weakref.ref, flats)]
    looked.whole = [weakref.ref(flat) for flat in flats if any(flat is listing for listing in listed)]


_first_steps = _FirstSteps()


def check_first_steps() -> None:
    """A flat parameter was made: optimizers are looked at before their next step."""
    _first_steps.wrapped += 1
    take_part(_first_steps)
    if torch.optim.Muon.__init__ is not _make_muon:
        torch.optim.Muon.__init__ = _make_muon  # type: ignore[method-assign]


_of_torch: AnyCallable = torch.optim.Muon.__init__


@functools.wraps(_of_torch)
def _make_muon(self: Optimizer, params: Iterable[object], *args: object, **kwargs: object) -> None:
    """torch's Muon looks at shapes when it is made, before there is a step to look at."""
    params = [*params]
    try:
        _of_torch(self, params, *args, **kwargs)
    except ValueError as error:
        if any(isinstance(p, torch.Tensor) and shard_behind(p) is not None for p in tree_leaves(params)):
            raise _coupled("Muon") from error
        raise


def _is_cut(flat: Listing) -> bool:
    """Whether what the optimizer sees is not one of the parameters as it is."""
    return flat.group.world_size > 1 or len(flat.originals) > 1 or flat.param.shape != flat.originals[0].shape


def _refuse_originals(optimizer: Optimizer) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    originals = [p for p in params if managing(p) is not None and shard_behind(p) is None]
    if originals:
        names = ", ".join(sorted(repr(name_of_original(p)) for p in originals)[:3])
        raise LifecycleError(
            f"{len(originals)} of the {len(params)} parameters of this {type(optimizer).__name__} were taken over by "
            f"FSDP modules after it was made ({names}{', ...' if len(originals) > 3 else ''}): it would never change "
            "them. Make the optimizer after wrapping, from the wrapped model's parameters()"
        )


def _refuse_differences(optimizer: Optimizer, listed: list[Listing]) -> None:
    """Ranks step the parts of one flat parameter: each with the same optimizer and the same options (collective)."""
    facts = [*option_facts(optimizer=type(optimizer).__name__), *group_facts(optimizer.param_groups, 0)]
    placed = [(f, n) for n, g in enumerate(optimizer.param_groups) for f in map(listing_of, g["params"])]
    for ranks in {f.group.ranks: f.group for f in listed}.values():
        params = sorted(
            (f"parameter {name_of_original(f.originals[0].param)!r}", f"in group {n}")
            for f, n in placed
            if f is not None and f.group.ranks == ranks.ranks
        )
        check_same_everywhere(ranks, [*facts, *params], "optimizers over the shards of one model")


def _agree_on_cleared(listings: Sequence[Listing]) -> None:
    """See [Note: cleared].

    Raises:
        OutOfStepError: another rank's program has not cleared the same gradients.
    """
    cleared = []
    for listing in listings:
        if listing.param.grad is None and listing.flat.unused.is_noted:
            unused, flat, here = listing.flat.unused.originals, listing.flat, set[int]()
            mine = range(listing.first, listing.first + len(listing.originals))
            here.update(p.item for p in flat.layout.pieces() if p.rank == flat.group.rank and p.item in mine)
            if any(not unused[k] for k in here or mine):
                cleared.append(listing.label)
    if cleared:
        channel = listings[0].group.channel("parameters")
        channel.agree(f"a step without the gradients of {', '.join(cleared)}")


def _refuse_coupled(optimizer: Optimizer) -> None:
    verdict, name = judge(optimizer), type(optimizer).__name__
    if verdict is Verdict.COUPLED:
        raise _coupled(name)
    if verdict is Verdict.UNKNOWN:
        logger.warning(
            "%s could not be tried for whether it updates every element by itself, which it has to over FSDP's shards; "
            "if it does, say so: shardkit.declare_elementwise(%s)",
            name,
            name,
        )


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
    their dimensions; a schedule that begins without decay has no reason to.
    """
    groups = optimizer.param_groups
    decaying = [g for g in groups if g.get("weight_decay")]
    is_empty = any(not g["params"] for g in decaying)
    undecayed = [f for g in groups if not g.get("weight_decay") for f in map(shard_behind, g["params"]) if f]
    matrices = [
        name
        for f in undecayed
        if is_empty or f in dimensions_asked
        for name, m in zip(f.names, f.originals, strict=True)
        if len(m.shape) > 1 and len(f.param.shape) < 2
    ]
    if matrices:
        logger.warning(
            "%s does not decay shards with matrices in them (%s, ...), and groups go by p.ndim, or one is empty. "
            "Shards of flat parameters have one dimension, so groups can't be made by p.ndim: take fully_shard, which "
            "lists rows of each parameter with its own dimensions; or note the names of what is to decay before "
            "wrapping, wrap with flatten=False, and choose by name. If nothing is to decay, pass weight_decay=0",
            type(optimizer).__name__,
            matrices[0],
        )
