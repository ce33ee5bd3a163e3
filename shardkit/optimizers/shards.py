"""Optimizers on several ranks: which parameters are shards, hooks around steps, and options alike on all ranks.

Shards are parts of flat parameters, of which each rank lists its own.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Group, as_written, not_compiled
from ..checks import all_gather_facts, in_words, option_facts
from ..errors import ConfigurationError
from ..torch_seams.tensors import is_dtensor
from ..types import Args, Kwargs, ParamGroup, StateDict, Tree

# What a registered parameter is listed for, by its id; both are held weakly by nobody else. Not by weak references to
# parameters: torch swaps the contents of DTensors when they move, and refuses that where there are any.
_listings: dict[int, weakref.ref[Tree]] = {}


def note_listings(listings: Iterable[Tree]) -> None:
    """Notes that the registered parameters (``param``) of these are listed for them."""
    for listing in listings:
        key = id(listing.param)
        before = _listings.get(key)
        if before is None or before() is not listing:
            _listings[key] = weakref.ref(listing, functools.partial(_forget, key))


def _forget(key: int, gone: object) -> None:
    if _listings.get(key) is gone:
        del _listings[key]


def listing_of(param: torch.Tensor) -> Tree:
    """Finds what a registered parameter or DTensor is listed for: a flat parameter, or a part of one; else None."""
    found = _listings.get(id(param))
    listing = None if found is None else found()
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
    found = _stand_ins.get(listed)
    shard = None if found is None else found()
    return listed if shard is None else shard


def lists_stand_ins(optimizer: Optimizer) -> bool:
    """Says whether an optimizer lists what stands for shards: its state is whole."""
    return any(changed_by_steps(p) is not p for g in optimizer.param_groups for p in g["params"])


def refuse_stand_ins(optimizer: Optimizer, what: str) -> None:
    """Raises ConfigurationError if an optimizer's state is whole where that of shards is asked for.

    Args:
        what: what was asked for.
    """
    if lists_stand_ins(optimizer):
        raise ConfigurationError(
            f"{what}: the state of this {type(optimizer).__name__} is whole already, by the model's own names, and not "
            "of FSDP's shards. Save optimizer.state_dict() (all ranks call it), and load it with "
            "optimizer.load_state_dict()"
        )


def refuse_shards(params: Iterable[torch.Tensor], what: str, instead: str) -> None:
    """Raises ConfigurationError if any of these is a shard.

    Args:
        what: what was to be made of them.
        instead: what to do.
    """
    if any(shard_behind(p) is not None for p in params):
        raise ConfigurationError(
            f"{what} was given parameters of an FSDP module. These are shards, other ones on each rank, and {what} "
            f"takes them for the same on all ranks. {instead}"
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
_lock = threading.Lock()  # ranks may be threads of one process


def take_part(part: StepPart, *, last: bool = False, refuses: bool = False) -> None:
    """Has it called in every step from now on; once, however often it is asked for.

    Args:
        last: after all others, who find the groups as the program knows them.
        refuses: it only looks at gradients, so that a step with a closure is none of its business before that has run.
    """
    with _lock:
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before))
            _registered.append(register_optimizer_step_post_hook(_after))
        if part not in _parts:
            if refuses:
                _refusing.append(part)
            if last:
                _last.append(part)
                _parts.append(part)
            else:
                _parts.insert(len(_parts) - len(_last), part)


@not_compiled
def _before(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Tree:
    # args begins with the optimizer itself
    is_first = len(args) > 1 and callable(args[1])
    closure = args[1] if is_first else kwargs.get("closure")
    for part in _parts:
        if not (part in _refusing and callable(closure)):
            part.before(optimizer)
    if not callable(closure):
        return None
    evaluated = _with_parts(optimizer, closure)
    if is_first:
        return (args[0], evaluated, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluated}


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
            told = all_gather_facts(
                group.channel("control"), keeps_own, label="the first gradients of an OSS"
            )
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


# ------------------------------------------------------------ which update every element by itself
# Which optimizers update every element by itself.
#
# Where an element's update needs nothing but its own gradient and state, it does not matter how parameters are cut and
# joined: shards of flat parameters give the same numbers as the parameters would. An optimizer that takes norms over a
# parameter (LAMB, Adafactor), or treats a matrix as one (Muon, Shampoo), gives others.
#
# torch's own optimizers are known. Any other class is tried once, on a few small tensors: stepped over parameters as
# they are and over the same numbers cut as shards are. Equal results are the definition.
KNOWN = (
    optim.SGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
_COUPLED = (optim.LBFGS, optim.Adafactor, optim.Muon)
_declared: set[type] = set()


class Verdict(enum.Enum):
    ELEMENTWISE = "every element is updated by itself"
    COUPLED = "an element's update depends on others"
    UNKNOWN = "it could not be tried"


def declare_elementwise(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Says that a class updates every element by itself, so that it is neither tried nor refused over shards.

    For classes that can't be tried (they need a device, arguments or calls that are not known here), or that are
    element-wise but for noise. May be used as a decorator. Subclasses are not included.
    """
    _declared.add(optimizer_class)
    return optimizer_class


def is_known_elementwise(optimizer_class: object) -> bool:
    """Says whether it is on the list, or was declared."""
    return optimizer_class in KNOWN or optimizer_class in _declared


def names_of_elementwise() -> str:
    return ", ".join([c.__name__ for c in KNOWN] + sorted(c.__name__ for c in _declared))


Cut = Callable[[torch.Tensor], list[torch.Tensor]]  # of a flat parameter
Maker = Callable[[Sequence[torch.Tensor]], Optimizer]
"""Makes optimizers of one class with the same options over other parameters."""


def judge(optimizer: Optimizer, make: Maker | None = None) -> Verdict:
    """Judges an optimizer, if need be by trying its class; the optimizer itself is not touched.

    Args:
        optimizer: of the class, with the options that count.
        make: makes another one; by default the class with the optimizer's ``defaults``, in which some options of some
            classes are missing.
    """
    kind = type(optimizer)
    if is_known_elementwise(kind):
        return Verdict.ELEMENTWISE
    if issubclass(kind, _COUPLED):
        return Verdict.COUPLED
    with as_written():  # some compile their update for each shape, which takes minutes
        verdict = _tried(optimizer, make or _maker(optimizer))
    # a norm of everything is the same however parameters are cut, but no rank has everything
    return (
        Verdict.COUPLED if verdict is Verdict.ELEMENTWISE and couples_parameters(optimizer, make) else verdict
    )


def couples_parameters(optimizer: Optimizer, make: Maker | None = None) -> bool:
    """Says whether parameters are updated otherwise where each has an optimizer of its own, as far as trying tells.

    A class that takes the norm of all gradients by itself does (LAMB), or that finds one step size for all. Arguments
    are those of :func:`judge`.
    """
    kind = type(optimizer)
    if is_known_elementwise(kind) or kind.__module__.startswith("torch.optim"):
        return False
    make, (parts, _) = make or _maker(optimizer), _SMALL
    whole, start, gradients = _drawn(parts, torch.device("cpu"))

    def only(k: int) -> Cut:
        return lambda flat: whole(flat)[k : k + 1]

    try:
        with torch.random.fork_rng(devices=[]), as_written():
            truth, again = (_stepped(make, whole, start, gradients) for _ in range(2))
            alone = torch.cat([_stepped(make, only(k), start, gradients) for k in range(len(parts))])
    except _FAILURES:
        return False
    allowed = _TOLERANCE * (truth - start).abs().max().item()
    is_noise = (again - truth).abs().max().item() > allowed
    return not is_noise and (alone - truth).abs().max().item() > allowed


# ------------------------------------------------------------ trying
# Parameters as (shape, size of their gradients), and where the flat one is cut. The second set is for optimizers
# that work on blocks of some hundred elements, and only of large tensors; the first is there so that one which makes
# square matrices of what it gets has been found out before.
_SMALL = ([((24, 20), 1.0), ((7,), 30.0), ((3, 2, 2, 2), 0.01)], 300)
_LARGE = ([((96, 128), 1.0), ((300,), 30.0)], 6300)
_STEPS = 3
_TOLERANCE = 1e-5  # of the largest change
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _tried(optimizer: Optimizer, make: Maker) -> Verdict:
    devices = dict.fromkeys(
        [torch.device("cpu"), *(p.device for g in optimizer.param_groups for p in g["params"])]
    )
    for device in devices:
        try:
            return _compared(make, device)
        except _FAILURES:
            continue
    return Verdict.UNKNOWN


def _maker(optimizer: Optimizer) -> Maker:
    """Makes optimizers of the class with the same options over other parameters."""
    kind: type = type(optimizer)
    accepted = inspect.signature(kind).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}
    options = {k: v for k, v in optimizer.defaults.items() if takes_any or k in names}
    if options.get("lr") == 0:  # a warm-up begins so
        options["lr"] = 0.01
    return lambda params: kind(params, **options)


def _compared(make: Maker, device: torch.device) -> Verdict:
    for parts, cut in (_SMALL, _LARGE):
        whole, start, gradients = _drawn(parts, device)

        def shards(flat: torch.Tensor, cut: int = cut) -> list[torch.Tensor]:
            return [flat[:cut], flat[cut:]]

        truth = _stepped(make, whole, start, gradients)
        change = (truth - start).abs().max().item()
        if not change > 0:
            return Verdict.UNKNOWN
        if (_stepped(make, shards, start, gradients) - truth).abs().max().item() <= _TOLERANCE * change:
            continue
        again = _stepped(make, whole, start, gradients)
        is_noise = (again - truth).abs().max().item() > _TOLERANCE * change
        return Verdict.UNKNOWN if is_noise else Verdict.COUPLED
    return Verdict.ELEMENTWISE if _keeps_elements(make, device) else Verdict.COUPLED


def _keeps_elements(make: Maker, device: torch.device) -> bool:
    """Says whether all state is numbers, and tensors with an element for each of the parameter's.

    What has other state uses it some day, be it after more steps than were tried: Shampoo that starts as SGD.
    """
    (param,) = params = [torch.nn.Parameter(torch.ones(24, 20, device=device))]
    optimizer = make(params)
    _switch_to_training(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return all(_is_by_element(value, param.numel()) for value in optimizer.state[param].values())


def _is_by_element(value: object, numel: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() in (1, numel)
    if isinstance(value, list | tuple):
        return all(_is_by_element(v, numel) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def _switch_to_training(optimizer: Optimizer) -> None:
    """Switches to training, without which schedule-free classes refuse to step."""
    switch = getattr(optimizer, "train", None)
    if callable(switch):
        switch()


def _drawn(
    parts: Sequence[tuple[Sequence[int], float]], device: torch.device
) -> tuple[Cut, torch.Tensor, list[torch.Tensor]]:
    """Returns what cuts these parameters out of a flat one, start values [N], and the gradients of each step, [N]."""
    shapes, generator = [torch.Size(shape) for shape, _ in parts], torch.Generator().manual_seed(0)
    numels = [shape.numel() for shape in shapes]

    def whole(flat: torch.Tensor) -> list[torch.Tensor]:
        return [v.view(s) for v, s in zip(flat.split(numels), shapes, strict=True)]

    def draw() -> torch.Tensor:
        rows = [torch.randn(n, generator=generator) * s for n, (_, s) in zip(numels, parts, strict=True)]
        return torch.cat(rows).to(device)

    return whole, draw(), [draw() for _ in range(_STEPS)]


def _stepped(make: Maker, cut: Cut, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the flat parameter [N] after some steps over what ``cut`` makes of it."""
    params = [torch.nn.Parameter(p.clone()) for p in cut(start)]
    optimizer = make(params)
    _switch_to_training(optimizer)
    for gradient in gradients:
        for p, g in zip(params, cut(gradient), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in params])
