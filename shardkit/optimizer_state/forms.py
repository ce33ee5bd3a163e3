"""State dicts of optimizers over shards: in whole parameters' shapes, or with this rank's shards, which are marked.

Forms in whole shapes differ in what they call parameters:

- by id, fairscale's: ids count the parameters of all units, the root's first, and a dict says more::

    {"state": {id: {...}}, "param_groups": [...], "param_id_map": {id: index in the optimizer or None},
     "uncollected_local_ids": [...]}

- by index, torch's: the ``state_dict()`` of the same optimizer over the same parameters in one process;
- by name, that of torch's FSDP: ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``.

FSDP's shards and OSS's segments are gathered by :func:`gather_states`, and cut by :meth:`~.kinds.Slot.cut`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from ..backend import Group
from ..checks import all_gather_facts_or_objects, problems_of_ranks
from ..errors import ConfigurationError, ShardkitError
from ..optimizers.elementwise import KNOWN
from ..optimizers.shards import listing_of, options_of, refuse_stand_ins, shard_behind
from ..torch_seams.hooks import callers
from ..torch_seams.tensors import MarkedTensor, as_plain, is_cut, local_of, stays_marked, whole
from ..torch_seams.wrappers import versions_of
from ..types import AnyCallable, Args, Kwargs, Memo, ParamGroup, SavedState, StateDict, Tree
from .kinds import Slot, StateKind, check_form, is_elementwise, to_cpu

EXTRA = ("param_id_map", "uncollected_local_ids")


class Held(NamedTuple):
    """One thing that an optimizer, or a model, lists: a parameter, or a shard that has several in it.

    Attributes:
        keys: what a form calls each parameter in it.
        slot: of a shard; None: the parameter is whole on every rank.
        position: among the optimizer's parameters; -1: it is none of these.
    """

    keys: Sequence[Tree]
    slot: Slot | None
    position: int


def _gathered(
    held: Sequence[Held],
    saved: SavedState,
    keep: bool,
    form: Form = lambda slot, part, shard: part,
    number: Callable[[StateKind], Tree] = StateKind.made,
    of_whole: Callable[[Tree], Tree] = lambda state: state,
) -> StateDict:
    """Returns the state of each parameter by its key (collective); empty unless ``keep``."""
    own_of = [saved["state"].get(h.position, {}) for h in held]
    shards = [(h.slot, own) for h, own in zip(held, own_of, strict=True) if h.slot is not None]
    gathered = iter(gather_states([s for s, _ in shards], [own for _, own in shards], keep, form, number))
    state: StateDict = {}
    for h, own in zip(held, own_of, strict=True):
        parts = [of_whole(own)] if h.slot is None else next(gathered)
        state.update((key, part) for key, part in zip(h.keys, parts, strict=True) if part and keep)
    return state


def _assembled(
    saved: SavedState, state: Mapping[Tree, Tree], groups: Sequence[ParamGroup] | None
) -> StateDict:
    """Makes a state dict of all this, and of what a saved one has beside, under names alike on all ranks."""
    named = {k: copy.deepcopy(v) for k, v in saved["state"].items() if isinstance(k, str) and k not in state}
    others = {k: v for k, v in saved.items() if k not in ("state", "param_groups", *EXTRA)}
    made = {"state": {**state, **named}, **others}
    return made if groups is None else {**made, "param_groups": list(groups)}


# ------------------------------------------------------------ by id
def _by_id(slots: Sequence[Slot], optimizer: Optimizer) -> list[Held]:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    position, count, found = {id(p): i for i, p in enumerate(params)}, 0, []
    for slot in slots:
        keys = range(count, count + len(slot.spans))
        found.append(Held(keys, slot, position.get(id(slot.param), -1)))
        count = keys.stop
    return found


def gather_by_id(
    slots: Sequence[Slot], uncollected: Set[int], saved: StateDict, optimizer: Optimizer, keep_on: bool
) -> StateDict | None:
    """Gathers the full state dict where ``keep_on``, None elsewhere (collective).

    Args:
        slots: all shards, in the order of ids.
        uncollected: ids of shards whose state is this rank's own and stays here.
        saved: ``optimizer.state_dict()``; further entries are passed on.
        optimizer: whose parameters are the shards.
        keep_on: whether this rank returns it.
    """
    held = _by_id(slots, optimizer)
    if held and all(h.position < 0 for h in held):
        raise ConfigurationError(
            f"this {type(optimizer).__name__} has none of the model's shards: make it of the model's parameters()"
        )
    collected = [h for h in held if id(h.slot and h.slot.param) not in uncollected]
    # as the optimizer has them: their places are for all ranks
    collected.sort(key=lambda h: (h.position < 0, h.position))
    state = _gathered(collected, saved, keep_on, number=lambda kind: copy.copy(kind.value))
    id_map: dict[int, int | None] = {}
    local_ids = []
    for keys, slot, position in held:
        own = saved["state"].get(position, {})
        stays = slot is not None and id(slot.param) in uncollected
        if stays and slot is not None:
            for key, value in own.items():
                kind = StateKind.of(key, value, slot.param.shape)
                join = slot.join if kind.spread and slot.world_size == 1 else None
                values: list[Tree] = join(value, True) if join else [kind.value] * len(keys)
                for i, v in zip(keys, values, strict=True):
                    state.setdefault(i, {})[key] = v
            local_ids += [position] if position >= 0 else []
        id_map.update(dict.fromkeys(keys, position if position >= 0 and (own or stays) else None))
    if not keep_on:
        return None
    ids = {id(h.slot.param): h.keys for h in held if h.slot is not None}
    groups = [
        {**options_in(theirs), "params": [i for p in own["params"] for i in ids.get(id(p), ())]}
        for theirs, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    made = _assembled(saved, dict(sorted(state.items())), groups)
    return OrderedDict({**made, "param_id_map": id_map, "uncollected_local_ids": local_ids})


def shard_by_id(
    slots: Sequence[Slot], full: StateDict, listed: Sequence[object], by_id: list[str], names: list[str]
) -> StateDict:
    """Cuts this rank's part of a full state dict, for ``optimizer.load_state_dict``; the argument is not changed.

    Args:
        listed: the model's parameters. Where each shard had several of what are shards of their own now, the optimizer
            is taken to have them in this order, and says so if it has not.
        by_id: names of parameters by id; a model that was wrapped in another way had another order.
        names: in the order of the model as it was written, by which plain optimizers number parameters.
    """
    check_form(full)
    id_map: dict[int, int | None] = full.get("param_id_map") or {}
    numbers = [i for g in full["param_groups"] for i in g["params"]]
    known = set(id_map or numbers)
    if known and len(known) != len(names):
        raise ConfigurationError(
            f"this optimizer state is of a model with {len(known)} parameters, this model has {len(names)}. Wrap "
            "the model as it was when it was saved; if its optimizer had trainable parameters alone, load it in one "
            "process, where save_training makes a checkpoint of it, and use restore_training"
        )
    if known and not id_map and len(full["param_groups"]) > 1:
        raise ConfigurationError(
            "this state of a plain optimizer with several groups does not say which parameters its numbers are. Load "
            "it in one process, where save_training makes a checkpoint of it, and use restore_training"
        )
    said = [name for g in full["param_groups"] for name in g.get("param_names", ())]
    noted = (versions_of(full) or {}).get(NOTE, [])
    # of FSDP, whose ids go by units
    said, numbers = ([] if noted == by_id else noted, [*range(len(noted))]) if id_map else (said, numbers)
    if said and sorted(said) == sorted(names):
        names, id_map = said, {}
    number_of = dict(zip(names, numbers, strict=False))
    ids_left = iter(range(len(names)) if id_map or not known else map(number_of.__getitem__, by_id))
    keys_of = [[*islice(ids_left, len(slot.spans))] for slot in slots]
    slot_of = {i: k for k, keys in enumerate(keys_of) for i in keys}
    groups: list[ParamGroup] = []
    is_sharded = any(s.world_size > 1 or s.param.shape != s.spans[0].shape for s in slots)
    kind = OrderedDict if is_sharded else dict  # as ``optimizer.state_dict()`` has them, and state below
    local_of, saved_with = dict[int, int](), dict[int, int]()  # of each index one shard
    is_finer = not id_map or any(
        given is not None and saved_with.setdefault(given, slot_of[i]) != slot_of[i]
        for i, given in id_map.items()
    )
    place = {id(p): n for n, p in enumerate(listed)}
    for group in full["param_groups"]:
        locals_: list[int] = []
        ids = group["params"]
        if is_finer:
            id_map, ids = {}, sorted(ids, key=lambda i: place.get(id(slots[slot_of[i]].param), i))
        for i in ids:
            k = slot_of[i]
            if k not in local_of:  # those without state have no index: they come in the optimizer's order
                given = id_map.get(i)
                local_of[k] = len(local_of) if given is None else given
            if local_of[k] not in locals_:
                locals_.append(local_of[k])
        options = copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})
        groups.append(kind(options, params=locals_))
        if is_finer and is_sharded:
            note_shards(groups[-1], [slots[k].param for k in dict.fromkeys(slot_of[i] for i in ids)])
    state: dict[int, StateDict] = {}
    for k, (slot, keys) in enumerate(zip(slots, keys_of, strict=True)):
        have = {n: full["state"][i] for n, i in zip(slot.names, keys, strict=True) if full["state"].get(i)}
        if have and k in local_of:
            cut = slot.cut(have)
            state[local_of[k]] = marked(cut, slot.param.shape) if slot.world_size > 1 else cut
    return _assembled(full, dict(sorted(state.items())), groups)


# ------------------------------------------------------------ by index
def gather_by_index(slots: Sequence[Slot | None], saved: StateDict, keep_on: bool) -> StateDict | None:
    """Gathers the state as one process has it, on the CPU (collective); None where not ``keep_on``.

    Args:
        slots: of the optimizer's parameters; each shard has one parameter.
    """
    held = [Held([index], slot, index) for index, slot in enumerate(slots)]
    state = _gathered(held, saved, keep_on, of_whole=to_cpu)
    groups = [{**options_in(g), "params": copy.copy(g["params"])} for g in saved["param_groups"]]
    return _assembled(saved, state, groups) if keep_on else None


def shard_by_index(slots: Sequence[Slot | None], full: StateDict) -> StateDict:
    """Cuts this rank's part of such a state, for ``optimizer.load_state_dict``; the argument is not changed."""
    ids = [i for g in full["param_groups"] for i in g["params"]]
    if len(ids) != len(slots):
        raise ConfigurationError(
            f"this optimizer state is of {len(ids)} parameters, this optimizer has {len(slots)}; nothing was loaded. "
            "Make it over the same parameters as when the state was saved"
        )
    position = {i: k for k, i in enumerate(ids)}
    state: dict[object, Tree] = {}
    for key, values in full["state"].items():
        slot = slots[position[key]] if key in position else None
        state[position.get(key, key)] = values if slot is None else slot.cut({slot.names[0]: values})
    groups = [{**g, "params": [position[i] for i in g["params"]]} for g in full["param_groups"]]
    return {**full, "state": state, "param_groups": groups}


# ------------------------------------------------------------ by name
def gather_by_name(
    known: Mapping[int, Held], optimizer: Optimizer, saved: StateDict, form: Form, keep: bool = True
) -> StateDict:
    """Gathers an optimizer's state by names (collective); empty without ``keep``.

    Args:
        known: all parameters of a model by identity, by name, in the same order on all ranks.
        form: what becomes of a parameter's state.
        keep: whether this rank returns anything.
    """
    state = _gathered([*known.values()], saved, keep, form)
    if not keep:
        return {}
    groups = [
        {**options_in(theirs), "params": [name for p in own["params"] for name in known[id(p)].keys]}
        for own, theirs in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False)
    ]
    return _assembled(saved, state, groups if "param_groups" in saved else None)


Source = Callable[[Slot | None, Sequence[str]], Mapping[str, SavedState]]
"""Of a shard and the names of the parameters in it: their state, where there is some."""


def shard_by_name(
    known: Mapping[int, Held], optimizer: Optimizer, groups: Sequence[ParamGroup], source: Source
) -> StateDict:
    """Cuts this rank's part of state by names, for ``optimizer.load_state_dict``.

    Args:
        known: as :func:`gather_by_name` takes them.
        groups: the ``param_groups`` that were saved. Options go to the optimizer's groups by the parameters in them.
            Without any, nothing was saved of them, and they stay.
        source: asked for each parameter of the model, in one order on all ranks.
    """
    group_of: dict[str, ParamGroup] = {}
    for group in groups:
        for name in group["params"]:
            if not isinstance(name, str):
                raise ConfigurationError(
                    "this optimizer state is by numbers of parameters; make it one by names: "
                    "FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, unwrapped_model)"
                )
            group_of[name] = group
    state: dict[int, StateDict] = {}
    for names, slot, position in known.values():
        have = source(slot, names)  # of all, in the model's order, for a source may be a collective
        if have and position >= 0:
            if slot is None:
                part = have[names[0]]
            else:
                inside = dict(zip(names, slot.names, strict=True))
                part = slot.cut({inside[name]: values for name, values in have.items()})
            # copies: torch loads tensors such as "step" as they are, and counts on in them
            state[position] = {
                k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in part.items()
            }
    made: list[ParamGroup] = []
    for group in optimizer.param_groups:
        inside_group = [known[id(p)] for p in group["params"]]
        listed = [name for h in inside_group for name in h.keys]
        options = _options_of(listed, group_of) if groups else options_in(group)
        made.append({**options, "params": [h.position for h in inside_group]})
    return {"state": dict(sorted(state.items())), "param_groups": made}


def _options_of(names: Sequence[str], group_of: Mapping[str, ParamGroup]) -> ParamGroup:
    lacking = [n for n in names if n not in group_of]
    if lacking:
        raise ConfigurationError(
            f"this optimizer state names no group of parameter {lacking[0]!r}: it is of another model, or of an "
            "optimizer that did not have it; nothing was loaded"
        )
    found: list[ParamGroup] = []
    for name in names:
        options = options_of(group_of[name])
        if options not in found:
            found.append(options)
    if len(found) > 1:
        keys = sorted(k for k in found[0] if found[0][k] != found[1].get(k))
        raise ConfigurationError(
            f"parameters of one group of the optimizer were in groups with other options ({', '.join(keys)}) when "
            "this state was saved; make the optimizer with the groups that it had"
        )
    return copy.deepcopy(found[0]) if found else {}


def from_state(state: Mapping[str, SavedState]) -> Source:
    """Makes a source of a state that this rank has."""

    def source(slot: Slot | None, names: Sequence[str]) -> Mapping[str, SavedState]:
        return {
            n: {k: whole(v) if is_cut(v) else v for k, v in state[n].items()} for n in names if state.get(n)
        }

    return source


def from_rank_0(state: Mapping[str, SavedState], group: Group) -> Source:
    """Makes a source of a state of a group's first rank, which sends it parameter by parameter (collective)."""
    mine = from_state(state)

    def source(slot: Slot | None, names: Sequence[str]) -> Mapping[str, SavedState]:
        have = mine(slot, names) if group.rank == 0 else {}
        control = group.channel("control")
        sent: Mapping[str, SavedState] = control.broadcast_object(have, 0, label="optimizer state of rank 0")
        return sent

    return source


# ------------------------------------------------------------ gathering
# What has one element for each of a shard's is gathered and taken apart; anything else is repeated for each parameter.
Form = Callable[[Slot, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a slot, a whole parameter's state (on the host), and this rank's part: what is returned."""

Kinds = dict[str, StateKind]


@torch.no_grad()
def gather_states(
    slots: Sequence[Slot],
    states: Sequence[StateDict],
    keep: bool = True,
    form: Form = lambda slot, part, shard: part,
    number: Callable[[StateKind], Tree] = StateKind.made,
) -> list[list[StateDict]]:
    """Gathers the state of each parameter of each shard (collective).

    Args:
        slots: shards, in one order on all ranks.
        states: this rank's, of each.
        keep: whether this rank returns any.
        form: what becomes of a state with one element for each of a parameter's.
        number: what becomes of all else.
    """
    found: list[list[StateDict]] = []
    for slot, own, everybody in zip(slots, states, kinds_everywhere(slots, states), strict=True):
        found.append([{} for _ in slot.spans])
        for key, kind in _merged(slot, everybody).items():
            parts: list[torch.Tensor] = []
            mine: Tree = own.get(key)
            if kind.spread and slot.join is not None:
                if mine is None:  # nothing that is here ever had a gradient
                    mine = torch.zeros(slot.param.shape, dtype=kind.dtype, device=slot.param.device)
                parts = slot.join(mine, keep)
            for k, state in enumerate(found[-1] if keep else ()):
                theirs = kind if slot.owners is None else everybody[slot.owners[k]].get(key)
                if theirs is not None:
                    state[key] = form(slot, parts[k], mine) if kind.spread else number(theirs)
    return found


def kinds_everywhere(slots: Sequence[Slot], states: Sequence[StateDict]) -> list[list[Kinds]]:
    """Learns what each slot's state is on each rank of its group (collective)."""
    mine = [
        {key: StateKind.of(key, value, slot.param.shape) for key, value in own.items()}
        for slot, own in zip(slots, states, strict=True)
    ]
    found = [[kinds] for kinds in mine]
    groups: dict[tuple[int, ...], Group] = {s.group.ranks: s.group for s in slots if s.group is not None}
    for ranks, group in groups.items():
        if group.world_size == 1:
            continue
        numbers = [n for n, slot in enumerate(slots) if slot.group is not None and slot.group.ranks == ranks]
        told = (
            [slots[n].names[0] for n in numbers],
            [{k: tuple(v) for k, v in mine[n].items()} for n in numbers],
        )
        everybody = all_gather_facts_or_objects(
            group.channel("control"), told, label="kinds of optimizer state"
        )
        for rank, (names, _) in zip(ranks, everybody, strict=True):
            if names != everybody[0][0]:
                raise ConfigurationError(
                    f"the optimizer of rank {rank} has other parameters than rank {ranks[0]}'s, or another "
                    "order of them: make it of the same parameters() on every rank"
                )
        for k, n in enumerate(numbers):
            found[n] = [{key: StateKind(*what) for key, what in kinds[k].items()} for _, kinds in everybody]
    return found


def _merged(slot: Slot, everybody: Sequence[Kinds]) -> Kinds:
    merged: Kinds = {}
    for theirs in everybody:
        for key, kind in theirs.items():
            merged.setdefault(key, kind)
    # of one parameter, all ranks know whether it has had a gradient, also those without a part of it
    is_alone = len(slot.spans) == 1 and slot.spans[0].shape.numel() and slot.owners is None
    for rank, theirs in enumerate(everybody) if is_alone and slot.group is not None else ():
        for key, kind in merged.items():
            if kind.spread and key not in theirs:
                raise ConfigurationError(
                    f"rank {slot.group.ranks[rank] if slot.group else rank} has no optimizer state {key!r} of "
                    f"{slot.names[0]!r}, which other ranks have: its optimizer lacks the parameter, or state was "
                    "removed or loaded on some ranks only. Make the optimizer of the same parameters, and load state, "
                    "on every rank"
                )
    return merged


# ------------------------------------------------------------ what is a rank's own, and what torch asks for
# State dicts that hold this rank's shards, as torch.distributed.checkpoint meets them.
#
# ``optimizer.state_dict()`` and ``local_state_dict()`` have shards under the same keys on all ranks. For a file of each
# rank's own that is right. torch.distributed.checkpoint takes plain tensors for the same on all ranks, and would keep
# one rank's for all. So what is a rank's own has a class of its own in state dicts, which refuses that and is a plain
# tensor in all other respects; what is pickled is one.
#
# [Note: requests] ``torch.distributed.checkpoint.state_dict`` (``get_model_state_dict`` and its kin) walks over the
# modules of a model and asks each for ``_fqn_modifiers()``, names that are no part of a parameter's. It does so first,
# and nobody else does. There a wrapper can see what is wanted, from the arguments of the function that was called, and
# refuse what would be wrong, before anything is sent or changed. Nothing else tells it.
_TORCHS = "torch.distributed.checkpoint.state_dict"
_OF_MODELS = ("get_model_state_dict", "set_model_state_dict")
_OF_OPTIMIZERS = ("get_optimizer_state_dict", "set_optimizer_state_dict", "get_state_dict", "set_state_dict")


class OwnOfRank(MarkedTensor):
    """A tensor in a state dict that is another one on each rank. Copies of it are such, too."""

    remedy: ClassVar[str] = ""

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_plain():
            result = func(*args, **(kwargs or {}))
            if stays_marked(result, args, cls):
                result.__class__ = cls
        return result

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        copied: torch.Tensor = self.clone()
        memo[id(self)] = copied
        return copied

    def _refuse(self, *_: object) -> NoReturn:
        # no ConfigurationError: for a ValueError torch would put a message of its own
        raise ShardkitError(self.remedy)

    # What torch.distributed.checkpoint asks of a tensor that knows how it is spread.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of torch's functions that get or set the state dicts of a model and its optimizers.

    Attributes:
        optimizers: what was passed; empty for functions of models alone.
        options: its StateDictOptions, None for the default.
        submodules: what was passed, of which alone a state dict is wanted.
    """

    function: str
    optimizers: tuple[Optimizer, ...]
    options: object
    submodules: object


def current_request() -> Request | None:
    """Tells what torch is being asked for at this moment; see [Note: requests]."""
    for frame in callers():
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _TORCHS and name in _OF_MODELS + _OF_OPTIMIZERS:
            given = frame.f_locals
            optimizers = given.get("optimizers", ()) if name in _OF_OPTIMIZERS else ()
            optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
            return Request(name, optimizers, given.get("options"), given.get("submodules"))
    return None


def is_called_by(function: str) -> bool:
    """Says whether that function of torch's called the method that asks, through what torch puts around methods."""
    for frame in islice(callers(), 1, 5):
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == _TORCHS:
            return True
    return False


# ------------------------------------------------------------ marks of an optimizer's shards
# Of an optimizer and its state_dict() the state as one process has it, and of such a state this rank's part.
WholeStates = tuple[Callable[[Optimizer, StateDict], StateDict], Callable[[Optimizer, StateDict], StateDict]]
_whole_states: list[WholeStates] = []

# In the groups of a state dict: whose shards it is of. In an attribute of the dict, as torch notes versions of modules,
# which copies, files and optimizers that load it keep; in files of shardkit 0.2 an option among others.
NOTE = "shardkit_shards"

_GATHERED = (
    "model.gather_full_optim_state_dict(optimizer) (all ranks call it, rank 0 gets it; load it by "
    "get_shard_from_optim_state_dict; after fully_shard these are methods of shardkit.sharding_of(model)), of "
    "shardkit.torch_fsdp FSDP.optim_state_dict(model, optimizer) or get_state_dict of shardkit.torch_fsdp.state_dict, "
    "or optimizer.state_dict() with torch.save for each rank"
)


class StateOfShard(OwnOfRank):
    """Optimizer state with one element for each of a shard."""

    remedy = (
        "this optimizer state is of FSDP's shards, another part on each rank, and torch.distributed.checkpoint "
        f"would keep one rank's for all. Save what comes from {_GATHERED}"
    )


class LocalShard(OwnOfRank):
    remedy = (
        "this local_state_dict() has FSDP's shards, another part on each rank, and torch.distributed.checkpoint would "
        "keep one rank's for all. Save FSDP.state_dict(), which is full on every rank, or local_state_dict() with "
        "torch.save for each rank"
    )


def note_whole_states(
    gather: Callable[[Optimizer, StateDict], StateDict], own_part: Callable[[Optimizer, StateDict], StateDict]
) -> None:
    """Lets torch's functions for state dicts get whole states from now on, where each shard is of one parameter."""
    _whole_states[:] = [(gather, own_part)]


def mark_state_dicts(optimizer: Optimizer, on_load: Callable[[Optimizer], None]) -> None:
    """Lets the optimizer's state dicts tell from now on whose state they hold; it still loads them.

    Args:
        on_load: called when another state is loaded.
    """

    def unmarked(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        on_load(optimizer)
        if _whole_states and _is_asked_for_whole(optimizer):
            return _whole_states[0][1](optimizer, state_dict)
        state = {i: {k: _plain(v) for k, v in values.items()} for i, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    # else another one is inside, which is marked itself
    if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        optimizer.register_state_dict_post_hook(_marked)
        optimizer.register_load_state_dict_pre_hook(unmarked)


def _is_asked_for_whole(optimizer: Optimizer) -> bool:
    """Says whether torch's functions ask, who know nothing of shards; DTensors say themselves what they are."""
    params = (p for g in optimizer.param_groups for p in g["params"])
    return current_request() is not None and any(shard_behind(p) is not None for p in params)


def _marked(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    if _whole_states and _is_asked_for_whole(optimizer):
        return _whole_states[0][0](optimizer, state_dict)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    state = dict(state_dict["state"])
    for index, values in state.items():
        param = params[index] if isinstance(index, int) else None
        flat = None if param is None else shard_behind(param)
        if param is not None and flat is not None and flat.group.world_size > 1:
            state[index] = marked(values, param.shape)
    groups = [OrderedDict(saved) for saved in state_dict["param_groups"]]
    for saved, own in zip(groups if state else (), optimizer.param_groups, strict=False):
        note_shards(saved, own["params"])
    return {**state_dict, "state": state, "param_groups": groups}


def marked(state: SavedState, shape: torch.Size) -> StateDict:
    """Returns a shard's state that tells that it is one; the shape is the shard's."""
    return {k: v.as_subclass(StateOfShard) if is_elementwise(k, v, shape) else v for k, v in state.items()}


def options_in(group: ParamGroup) -> ParamGroup:
    """Copies what a group of a state dict says of its parameters."""
    return copy.deepcopy({k: v for k, v in group.items() if k not in ("params", NOTE)})


def note_shards(group: ParamGroup, params: Iterable[torch.Tensor]) -> None:
    """Makes a group of a state dict, an OrderedDict, tell of which shards it is."""
    group._metadata = {NOTE: _note(params)}  # type: ignore[attr-defined]


def _note(params: Iterable[torch.Tensor]) -> list[list[object]]:
    """Describes each flat parameter of a group: the rank, the world size, names and places of its originals."""
    flats = [f for f in map(listing_of, params) if f is not None]
    return [[f.group.rank, f.group.world_size, list(f.names), f.layout.described()] for f in flats]


# ------------------------------------------------------------ what was loaded
def check_loaded(optimizer: Optimizer, flats: Iterable[Tree]) -> None:
    """Refuses state of other shards on all ranks, before it steps (collective).

    Torch loads what it is given, and has no hook for optimizers that never stepped. It keeps what groups hold.
    """
    mine = _wrong_shards(optimizer) or _wrong_shapes(optimizer)
    for group in {f.group.ranks: f.group for f in flats}.values():
        for rank, wrong in problems_of_ranks(group, mine, "check of loaded optimizer state"):
            raise ConfigurationError(
                f"rank {rank} has loaded optimizer state {wrong}. No parameter was changed on any rank. "
                "optimizer.state_dict() of shards loads on the rank that saved it, with the same world size and "
                "wrapping; for others use gather_full_optim_state_dict and get_shard_from_optim_state_dict"
            )
    for param_group in optimizer.param_groups:
        param_group.pop(NOTE, None)
        (versions_of(param_group) or {}).pop(NOTE, None)
    for values in optimizer.state.values():  # loaded before there was a hook for it
        if isinstance(values, dict):
            values.update({k: _plain(v) for k, v in values.items()})


def _wrong_shards(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        saved, own = (versions_of(group) or group).get(NOTE), _note(group["params"])
        if saved is None or saved == own:
            continue
        if len(saved) != len(own):
            return f"of {len(saved)} shards in a group that has {len(own)}"
        a, b = next((a, b) for a, b in zip(saved, own, strict=True) if a != b)
        if a[1] != b[1]:
            return f"of world size {a[1]}, this is {b[1]}"
        if a[0] != b[0]:
            return f"of rank {a[0]}"
        return f"of a shard of {a[2]} with {a[3]} elements, here are {b[2]} with {b[3]}"
    return None


def _wrong_shapes(optimizer: Optimizer) -> str | None:
    """Compares shapes, of state that tells nothing about itself."""
    if type(optimizer) not in KNOWN:
        return None
    for param, state in optimizer.state.items():
        flat = listing_of(param) if isinstance(param, torch.Tensor) else None
        for key, value in state.items() if flat is not None else ():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > 0
                and local_of(value).shape != local_of(param).shape
            ):
                names, found, own = flat.names, tuple(local_of(value).shape), tuple(local_of(param).shape)
                return f"{key!r} of shape {found} for a shard of {names} of shape {own}"
    return None


def _plain(value: Tree) -> Tree:
    return value.as_subclass(torch.Tensor) if isinstance(value, StateOfShard) else value


def mark_shards(params: Iterable[torch.Tensor], state: StateDict) -> None:
    """Makes the shards in a local state dict tell that they are such."""
    shards = {p.data_ptr() for p in params if p.numel()}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.data_ptr() in shards:
            state[key] = value.as_subclass(LocalShard)


# ------------------------------------------------------------ asked by torch for a state dict
def check_request(flats: Callable[[], Iterable[Tree]] | None = None) -> None:
    """Refuses what torch's functions for state dicts would do wrong with shards; see [Note: requests].

    Args:
        flats: gives all flat parameters of the module that is asked; None where shards are listed under the
            parameters' names.
    """
    request = current_request()
    if request is None:
        return
    for optimizer in request.optimizers:
        refuse_stand_ins(optimizer, request.function)
    behind = [shard_behind(p) for o in request.optimizers for g in o.param_groups for p in g["params"]]
    if any(f is not None and not (flats is None and len(f.originals) == 1) for f in behind):
        raise ConfigurationError(
            f"{request.function}: this optimizer's state is of FSDP's shards, another part on each rank, and torch "
            f"would take it for whole parameters'. Use {_GATHERED}"
        )
    if flats is None:
        return  # torch leaves out what it is told to by these names
    if request.submodules:
        raise _not_possible(request, "submodules=")
    if getattr(request.options, "ignore_frozen_params", False) and any(
        not m.param.requires_grad for flat in flats() for m in flat.originals
    ):
        raise _not_possible(request, "ignore_frozen_params=True")


def _not_possible(request: Request, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{request.function}({what}) looks for parameters that FSDP has put into flat parameters; take what you want "
        "by name from FSDP.state_dict(), on all ranks"
    )
