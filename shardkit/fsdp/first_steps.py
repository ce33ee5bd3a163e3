"""Looks at each optimizer once, before its first step: would it do to parameters what it does to shards?

A plain process has parameters where FSDP lists flat parameters. An optimizer notices if it was made before wrapping
(its parameters get no gradients), if it looks at more than one element at a time, or if it was told to treat matrices
in another way: shards have one dimension.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..checks.same_everywhere import check_same_everywhere, option_facts
from ..errors import ConfigurationError, LifecycleError
from ..optimizers.elementwise import Verdict, judge, names_of_elementwise
from ..optimizers.shards import shard_behind
from ..optimizers.stepping import take_part
from ..types import AnyCallable
from .originals import Listing, managing, name_of_original
from .state_of_shards import check_loaded, mark_state_dicts

logger = logging.getLogger("shardkit")


class _FirstSteps:
    """Looks again when an optimizer has other parameters or loaded state, or when more modules were wrapped.

    What is a collective depends on the optimizer alone: ranks, which may be threads, wrap at times of their own.
    """

    def __init__(self) -> None:
        self.wrapped = 0
        self._seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._seen_wrapped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before(self, optimizer: Optimizer) -> None:
        wrapped, now = self.wrapped, tuple([len(g["params"]) for g in optimizer.param_groups])
        is_same = self._seen.get(optimizer) == now
        if not is_same or self._seen_wrapped.get(optimizer) != wrapped:
            _refuse_originals(optimizer)
            self._seen_wrapped[optimizer] = wrapped
        if is_same:
            return
        flats = [f for g in optimizer.param_groups for f in map(shard_behind, g["params"]) if f is not None]
        if any(_is_cut(f) for f in flats):
            is_new = optimizer not in self._judged
            if is_new or optimizer in self._loaded:
                check_loaded(optimizer, flats)
                self._loaded.discard(optimizer)
            if is_new:
                _refuse_differences(optimizer, flats)
                _refuse_coupled(optimizer)
                _warn_of_groups_by_dimension(optimizer)
                mark_state_dicts(optimizer, self._look_again)
                self._judged.add(optimizer)
        self._seen[optimizer] = now

    def _look_again(self, optimizer: Optimizer) -> None:
        self._seen.pop(optimizer, None)
        self._loaded.add(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        """Nothing to undo."""


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


def _refuse_differences(optimizer: Optimizer, flats: list[Listing]) -> None:
    """Ranks step the parts of one flat parameter: each with the same optimizer and the same options (collective)."""
    facts = option_facts(optimizer=type(optimizer).__name__)
    for index, group in enumerate(optimizer.param_groups):
        facts += option_facts(
            **{f"{k} of group {index}": group[k] for k in sorted(group) if k not in ("params", "param_names")}
        )
    placed = [(f, n) for n, g in enumerate(optimizer.param_groups) for f in map(shard_behind, g["params"])]
    for ranks in {f.group.ranks: f.group for f in flats}.values():
        params = sorted(
            (f"parameter {name_of_original(f.originals[0].param)!r}", f"in group {n}")
            for f, n in placed
            if f is not None and f.group.ranks == ranks.ranks
        )
        check_same_everywhere(ranks, [*facts, *params], "optimizers over the shards of one model")


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
    """Groups made by ``p.ndim`` put all flat parameters with the biases: one with weight decay is left empty."""
    groups = optimizer.param_groups
    left_empty = any(not g["params"] and g.get("weight_decay") for g in groups)
    undecayed = [f for g in groups if not g.get("weight_decay") for f in map(shard_behind, g["params"]) if f]
    matrices = [n for f in undecayed for n, m in zip(f.names, f.originals, strict=True) if len(m.shape) > 1]
    if left_empty and matrices:
        logger.warning(
            "%s has a group with weight decay but without parameters, while flat parameters with matrices in them "
            "(%s, ...) are in one without weight decay. Flat parameters have one dimension, so groups can't be made by "
            "p.ndim: note the names of what is to decay before wrapping, wrap with flatten=False, and choose by name",
            type(optimizer).__name__,
            matrices[0],
        )
