"""Optimizers on several ranks: which parameters are shards, hooks around steps, and options alike on all ranks.

Shards are parts of flat parameters, of which each rank lists its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Group, not_compiled
from ..checks import facts_of_all, in_words, option_facts
from ..errors import ConfigurationError
from ..torch_seams.tensors import is_dtensor
from ..types import Args, Kwargs, ParamGroup, StateDict, Tree

# What a registered parameter is listed for, by its id; both are held weakly by nobody else. Not by weak references to
# parameters: torch swaps the contents of DTensors when they move, and refuses that where there are any.
_listings: dict[int, weakref.ref[Tree]] = {}
_nothing: Callable[[], None] = type(None)  # in place of a reference, gives None


def note_listings(listings: Iterable[Tree]) -> None:
    """Notes that the registered parameters (``param``) of these are listed for them."""
    for listing in listings:
        key = id(listing.param)
        if _listings.get(key, _nothing)() is not listing:
            _listings[key] = weakref.ref(listing, functools.partial(_forget, key))


def _forget(key: int, gone: object) -> None:
    if _listings.get(key) is gone:
        del _listings[key]


def listing_of(param: torch.Tensor) -> Tree:
    """Finds what a registered parameter or DTensor is listed for: a flat parameter, or a part of one; else None."""
    listing = _listings.get(id(param), _nothing)()
    return listing if listing is not None and listing.param is param else None


def are_registered(ids: Iterable[int]) -> bool:
    """Says whether one of them may be that of a registered parameter; :func:`listing_of` tells of which."""
    return not _listings.keys().isdisjoint(ids)


def shard_behind(param: torch.Tensor) -> Tree:
    """Finds it for plain tensors alone: shards, whose parts are on other ranks and nobody says so."""
    listing = listing_of(param)
    return None if listing is None or is_dtensor(param) else listing


# Parameters whose places others have taken after sharding: optimizers that are older list them still, for nothing.
given_way: WeakIdKeyDictionary = WeakIdKeyDictionary()
# What an optimizer lists in place of shards, and the shard that its step changes.
_stand_ins: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_stand_in(listed: torch.Tensor, shard: torch.Tensor) -> None:
    """Notes that steps of an optimizer that lists this tensor change that shard."""
    _stand_ins[listed] = weakref.ref(shard)


def has_stand_ins(shard: torch.Tensor) -> bool:
    """Says whether an optimizer lists some for what is in a shard, and knows how that is laid out."""
    return any(found() is shard for found in _stand_ins.values())


def changed_by_steps(listed: torch.Tensor) -> torch.Tensor:
    """Returns what the step of an optimizer that lists a tensor changes: the tensor, or what it stands for."""
    shard = _stand_ins.get(listed, _nothing)()
    return listed if shard is None else shard


def lists_stand_ins(optimizer: Optimizer) -> bool:
    """Says whether an optimizer lists what stands for shards: its state is whole."""
    return any(changed_by_steps(p) is not p for g in optimizer.param_groups for p in g["params"])


def refuse_stand_ins(optimizer: Optimizer, what: str) -> None:
    """Raises ConfigurationError if an optimizer's state is whole where that of shards is asked for."""
    if lists_stand_ins(optimizer):
        raise ConfigurationError(
            f"{what}: the state of this {type(optimizer).__name__} is whole already, by the model's own names, and not "
            "of FSDP's shards. Save optimizer.state_dict() (all ranks call it), and load it with "
            "optimizer.load_state_dict()"
        )


def refuse_shards(params: Iterable[torch.Tensor], what: str, instead: str) -> None:
    """Raises ConfigurationError if any of these, of which ``what`` was to be made, is a shard, or a DTensor."""
    if any(shard_behind(p) is not None or is_dtensor(p) for p in params):
        raise ConfigurationError(
            f"{what} was given parameters of an FSDP module, or DTensors. These are shards, other ones on each rank, "
            f"and {what} takes them for the same on all ranks. {instead}"
        )


# ------------------------------------------------------------ hooks around the update of any optimizer
# torch calls hooks before and after ``step``. With a closure, gradients come in between: then what concerns them ends
# before the closure runs, and begins anew after it.
class StepPart(Protocol):
    """Takes part in every step of every optimizer; cheap where it is not concerned."""

    def before(self, optimizer: Optimizer) -> None:
        """Is called when gradients are what the update will read."""

    def after(self, optimizer: Optimizer) -> None:
        """Undoes, once the update is through or gradients are about to change, what ``before`` did."""


_parts: list[StepPart] = []
_last: list[StepPart] = []  # the end of these: before an update after all others, and undone before them
_refusing: list[StepPart] = []  # not asked before a closure, which may bring what they miss
_registered: list[object] = []
_OURS = -1  # among an optimizer's own hooks, whose numbers count from 0
_lock = threading.Lock()  # ranks may be threads of one process


def take_part(part: StepPart, *, last: bool = False, refuses: bool = False) -> None:
    """Has it called in every step from now on; once, however often it is asked for.

    Args:
        last: after all others, who find the groups as the program knows them.
        refuses: it only looks at gradients, so that a step with a closure is none of its business before that has run.
    """
    with _lock:
        if not _registered:
            hooks = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)
            _registered.extend(hooks)
        if part not in _parts:
            if refuses:
                _refusing.append(part)
            _parts.insert(len(_parts) if last else len(_parts) - len(_last), part)
            if last:
                _last.append(part)


@not_compiled
def _before(optimizer: Optimizer, args: Args, kwargs: Kwargs, is_last: bool = False) -> Tree:
    if not is_last and (own := getattr(optimizer, "_optimizer_step_pre_hooks", None)):
        own[_OURS] = functools.partial(_before, is_last=True)  # they may change gradients: clip them
        return None
    # args begins with the optimizer itself
    is_first = len(args) > 1 and callable(args[1])
    closure = args[1] if is_first else kwargs.get("closure")
    for part in _parts:
        if not (part in _refusing and callable(closure)):
            part.before(optimizer)
    if after := getattr(optimizer, "_optimizer_step_post_hooks", None):
        after[_OURS] = _after  # a program's own may raise
        after.move_to_end(_OURS, last=False)
    if not callable(closure):
        return None
    evaluated = _with_parts(optimizer, closure)
    if is_first:
        return (args[0], evaluated, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluated}


@not_compiled
def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    getattr(optimizer, "_optimizer_step_pre_hooks", {}).pop(_OURS, None)
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


# ------------------------------------------------------------ optimizers for each parameter, in backward
# Where torch's ``_apply_optimizer_in_backward`` is, and what it notes on a parameter for which it has made some.
IN_BACKWARD, MADE = "torch.distributed.optim.apply_optimizer_in_backward", "_in_backward_optimizers"


def step_in_backward(shards: Iterable[Tree]) -> None:
    """Has a shard's, not those noted on a copy, step as soon as its gradient is reduced: autograd never comes to it."""
    for shard in shards:
        are_its = [o.param_groups[0]["params"][0] is shard for o in getattr(shard, MADE, ())]
        if any(are_its) and _step_at_once not in (shard._post_accumulate_grad_hooks or {}).values():
            shard.register_post_accumulate_grad_hook(_step_at_once)


def _step_at_once(shard: Tree) -> None:
    for optimizer in shard._in_backward_optimizers:
        optimizer.step()
    shard.grad = None


def refuse_steps_in_backward(params: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError if there are any for these, whose gradients are for other ranks."""
    if any(hasattr(param, MADE) for param in params):
        raise ConfigurationError(
            "torch's _apply_optimizer_in_backward has made optimizers for parameters whose gradients are reduced over "
            "ranks: they would step by those of this rank, or by none. With FSDP (fully_shard, torch_fsdp) call it "
            "after wrapping, with the parameters that are listed then; beside a ShardedDDP step its OSS after backward"
        )


# ------------------------------------------------------------ options and gradients of a step, the same on all ranks
_grad_of = attrgetter("grad")


def options_of(group: ParamGroup, of_rank: Container[str] = ()) -> StateDict:
    """Returns the options of a param group, without those that are each rank's own."""
    return {k: v for k, v in group.items() if k != "params" and k != "param_names" and k not in of_rank}


def copy_options(source: list[ParamGroup], target: list[ParamGroup]) -> None:
    """Groups of one optimizer get the options of another's."""
    for a, b in zip(source, target, strict=True):
        b.update(options_of(a))


def group_facts(
    groups: Sequence[ParamGroup], first: int, of_rank: Container[str] = ()
) -> list[tuple[str, object]]:
    """Returns options of the param groups from this one on."""
    facts = []
    for index, group in enumerate(groups[first:], first):
        options = options_of(group, of_rank)
        facts += option_facts(**{f"{k} of group {index}": options[k] for k in sorted(options)})
    return facts


_optimizers: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def numbered(group: Group, name: str) -> str:
    """Tells optimizers from all others over a group's ranks, which make them in one order."""
    number = _optimizers[group] = _optimizers.get(group, 0) + 1
    return f"{name} {number}"


class AgreedOptions:
    """Options of an optimizer's param groups, which are the same on all ranks: told when they change.

    To compare them in each step would take a collective. So a rank on which something has changed since its last step
    says what; the others say the same before they step, or are found to be in another call.

    Args:
        of_rank: names of those that are each rank's own.
    """

    def __init__(self, of_rank: Container[str] = ()) -> None:
        self._of_rank = of_rank
        self._known: list[StateDict] | None = None

    def note(self, groups: Sequence[ParamGroup]) -> None:
        """Notes that these are the same everywhere: ranks have compared them, or come from a step that all made."""
        self._known = _snapshot(groups, self._of_rank)

    def check(self, group: Group, groups: Sequence[ParamGroup]) -> None:
        """Compares them before a step."""
        now, known = _snapshot(groups, self._of_rank), self._known
        if known is None or now == known or group.world_size == 1:
            return
        self._known = now
        changed = [
            f"{key} of group {index} {in_words(groups[index][key])}"
            for index, new in enumerate(now)
            for key, value in new.items()
            if index >= len(known) or key not in known[index] or known[index][key] != value
        ]
        group.agree(f"a step with other options than before: {', '.join(changed)}")


class AgreedGradients:
    """Knows which parameters have a gradient in a step, the same on all ranks that hold all: told when it changes.

    Nothing is asked of ranks that keep the gradients of what they own alone.
    """

    def __init__(self) -> None:
        self._there: list[bool] | None = None
        self._are_whole = True

    def check(self, group: Group, params: Sequence[nn.Parameter], owned: Sequence[bool]) -> None:
        """Compares them before a step, of whose gradients nothing else is known.

        Args:
            owned: which of them this rank updates.
        """
        there = [g is not None for g in map(_grad_of, params)]
        if there == self._there or group.world_size == 1:
            return
        before, self._there = self._there, there
        if not group.backend.even_shards_only and (before is None or len(before) != len(there)):
            others = [has for has, mine in zip(there, owned, strict=True) if not mine]
            keeps_own = any(there) and bool(others) and not any(others)
            told = facts_of_all([group], keeps_own, label="the first gradients of an OSS")
            self._are_whole = not any(told)
        if self._are_whole:
            without = [str(k) for k, has in enumerate(there) if not has]
            which = f"without those of parameters {', '.join(without)}" if without else "all"
            group.channel("parameters").agree(f"a step with gradients: {which}")


def _snapshot(groups: Sequence[ParamGroup], of_rank: Container[str]) -> list[StateDict]:
    """Returns options, with what tells of a change in place of tensors: to read one could wait for a device."""
    return [
        {
            k: (id(v), v._version) if isinstance(v, torch.Tensor) else v
            for k, v in options_of(group, of_rank).items()
        }
        for group in groups
    ]
