"""What a checkpoint is of: a model and its optimizers, by the model's names, and state that each rank has of its own.

[Note: another world size] Where a checkpoint is restored by another number of ranks than wrote it (W), rank r takes
the random states of rank r % W: the first W ranks go on as they were, and further ones begin where others do, so that
no state is made up. A loader's states go to all ranks where they are equal on all; else only the loader itself knows
how to divide what is left, by :meth:`TakesRankStates.load_rank_states`.
"""

from __future__ import annotations

import abc
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import Backend
from ..errors import ConfigurationError, LifecycleError
from ..fsdp.construct import wake
from ..fsdp.flat_param import FlatParam, Registered, RegisteredShard
from ..fsdp.originals import refuse_meta, refuse_split
from ..fsdp.state import ShardingState, plain_name, state_of
from ..fsdp.state_dict import buffers_of, name_at, place_of, slot_of, written_parameters
from ..layout import Piece
from ..optimizer_state.forms import NOTE
from ..optimizer_state.kinds import (
    Fixed,
    Leaf,
    Ranks,
    Slot,
    Span,
    of_dtensor,
    piece_of,
    refuse_class,
    to_cpu,
    whole,
)
from ..optimizers.shards import copy_options, given_way, options_of, shard_behind
from ..oss.optimizer import OSS
from ..oss.sharded_ddp import ShardedDDP
from ..torch_seams.tensors import is_dtensor
from ..training.adascale import AdaScale
from ..training.whole_parameters.exchange import Part
from ..training.whole_parameters.optimizer import WholeParameters
from ..training.whole_parameters.optimizer import slot_of as slot_of_parts
from ..types import StateDict, Tree

EXTRA = "_extra_state"


class ModelState:
    """A model, unwrapped, and where its parameters are.

    Args:
        model: as it trains: plain, wrapped by anything that averages gradients, or sharded.
        ranks: those that save or restore.

    Attributes:
        module: the model without what averages its gradients.
        is_sharded: some of it lies in flat parameters.
        same: ranks that write what every rank has as a whole.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.module = model
        while isinstance(self.module, (ShardedDDP, DistributedDataParallel, DataParallel)):
            self.module = self.module.module
        # who wraps a model keeps it the same on all ranks; else nobody says so, and the first rank's counts
        self.same = ranks.everybody if self.module is not model else (0,)
        self.ranks = ranks
        self._copies: dict[int, tuple[int, ...]] = {}
        self._here: dict[int, dict[int, Piece]] = {}
        self._taken: StateDict = {}
        self.states = [s for s in (state_of(m) for m in self.module.modules()) if s is not None]
        for state in self.states:
            wake(state)
        for state in self.states:
            self._add(state)
        self.is_sharded = bool(self.states)

    def _add(self, state: ShardingState) -> None:
        for flat in state.flats:
            refuse_meta(flat)
            refuse_split(flat.originals, "a training checkpoint", "Save with torch.distributed.checkpoint")
            if flat.is_summoned:
                raise LifecycleError(
                    "parameters are summoned or unsharded at this moment, and changes to them not yet in the shards: "
                    "save and restore after `with summon_full_params()` has ended (or after reshard())"
                )
            replicas = state.replicas.ranks if state.replicas is not None else ()
            held = len(flat.group.ranks) * max(1, len(replicas))
            if not set(flat.group.ranks) <= set(self.ranks.world) or held != self.ranks.size:
                self.ranks.refuse_others(flat.names[0], flat.group.ranks)
            self._copies[id(flat)] = self.ranks.places(replicas) if replicas else self.ranks.alone
            pieces = {p.item: p for p in flat.layout.pieces() if p.rank == flat.group.rank}
            self._here[id(flat)] = pieces

    # ------------------------------------------------------------ facts
    def copies_of(self, flat: FlatParam, number: int | None = None) -> tuple[int, ...]:
        """Returns the ranks that have the same shard, or the same part of an original parameter in it."""
        is_copied = number is not None and flat.layout.is_copied(number)
        return self.ranks.everybody if is_copied else self._copies[id(flat)]

    def piece(self, flat: FlatParam, number: int) -> Piece | None:
        """Finds the piece of an original parameter on this rank."""
        return self._here[id(flat)].get(number)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, FlatParam | None, int]]:
        """Yields (name, parameter, flat parameter that it lies in, number in that), tied ones under each name."""
        for name, param in written_parameters(self.module):
            flat, number = place_of(param)
            yield name, param, flat, number

    # ------------------------------------------------------------ leaves
    def leaves(self) -> dict[str, Leaf | Fixed]:
        """Lists everything that a state dict has, by name; what is no tensor as it is."""
        if not self.is_sharded:
            self._taken = self.module.state_dict(keep_vars=True)
            return {plain_name(name): self._leaf(name, value) for name, value in self._taken.items()}
        found: dict[str, Leaf | Fixed] = {}
        shards = {id(f): f.param.detach() for s in self.states for f in s.flats}
        for name, param, flat, number in self.parameters():
            if flat is None:
                found[name] = self._leaf(name, param)
            else:
                shape = flat.originals[number].shape
                copies = self.copies_of(flat, number) if shape.numel() else (0,)
                found[name] = piece_of(shape, shards[id(flat)], self.piece(flat, number), copies)
        modules = list(self.module.named_modules(remove_duplicate=False))
        extras = [(p, m) for p, m in modules if type(m).get_extra_state is not nn.Module.get_extra_state]
        given = [(name_at(path, EXTRA), m.get_extra_state()) for path, m in extras]
        for name, value in [*buffers_of(modules), *given]:
            found[name] = self._leaf(name, value, of_first=True)
        return found

    def _leaf(self, name: str, value: object, of_first: bool = False) -> Leaf | Fixed:
        if not isinstance(value, torch.Tensor):
            return Fixed(value)
        if value.is_meta:
            raise ConfigurationError(f"{name!r} has no values yet: it is on the meta device")
        if is_dtensor(value):
            return of_dtensor(name, value, self.ranks)
        if is_traceable_wrapper_subclass(value):
            refuse_class(name, value)
        # buffers may differ between ranks: those of the first count, as in state dicts
        is_buffer = of_first or not isinstance(value, nn.Parameter)
        return whole(value, (0,) if is_buffer else self.same)

    # ------------------------------------------------------------ loading
    def loaded(self, found: Mapping[str, object]) -> None:
        """Takes what is no tensor, after values were written into the leaves."""
        for state in self.states:
            for flat in state.flats:
                flat.drop()  # what is gathered is of before
        if self.is_sharded:
            for path, m in self.module.named_modules(remove_duplicate=False):
                name = name_at(path, EXTRA)
                if name in found:
                    m.set_extra_state(cast(Tree, found[name]))
            return
        given = {name: found.get(plain_name(name), value) for name, value in self._taken.items()}
        with torch.no_grad():
            self.module.load_state_dict(given, strict=True)


# ------------------------------------------------------------ optimizers
class Holder(abc.ABC):
    """An optimizer, whatever spreads its state.

    Args:
        optimizer: without what wraps it.
        names: of the model's parameters.
    """

    def __init__(self, optimizer: Optimizer, names: ParameterNames) -> None:
        self.optimizer = optimizer
        self.names = names

    @abc.abstractmethod
    def states(self) -> list[tuple[Slot, StateDict]]:
        """Lists the state that this rank answers for (its copies, too)."""

    @abc.abstractmethod
    def groups(self) -> list[StateDict]:
        """Lists param groups, with names in place of parameters."""

    @abc.abstractmethod
    def needed(self) -> list[Slot]:
        """Lists the slots whose state this rank's optimizer needs."""

    @abc.abstractmethod
    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        """Takes the state of each needed slot, each group's options, and what else there is."""

    def shards(self) -> list[Slot]:
        """Slots that are shards, where a rank may lack state that others have; the same ones on all ranks."""
        return []

    def writers_of(self, group: int) -> tuple[int, ...]:
        """Returns the ranks whose options of a group count."""
        return (0,)

    def others(self) -> StateDict:
        return {}

    def unclaimed(self, others: Iterable[str], named: Iterable[str]) -> set[str]:
        """Finds what a checkpoint has as :meth:`others` and :meth:`named`, and nobody here would take."""
        return set()

    def named(self) -> dict[str, object]:
        """Returns state under names of its own, alike on all ranks (AdaScale's averages)."""
        state: Tree = self.optimizer.state
        return {k: copy.deepcopy(v) for k, v in state.items() if isinstance(k, str)}

    def load_named(self, found: Mapping[str, object]) -> None:
        state: Tree = self.optimizer.state
        state.update(found)


class ParameterNames:
    """Finds the model's parameters that a parameter of an optimizer stands for.

    Attributes:
        frozen: names of those that don't train.
    """

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self.ranks = model.ranks
        self._of_flat: dict[int, dict[int, str]] = {}
        self._of_param: dict[int, str] = {}
        self._listings: dict[int, Registered] = {}
        self.frozen: set[str] = set()
        for name, param, flat, number in model.parameters():
            if not (param if flat is None else flat.param).requires_grad:
                self.frozen.add(name)
            if flat is None:
                self._of_param.setdefault(id(param), name)
                continue
            self._of_flat.setdefault(id(flat), {}).setdefault(number, name)
            self._listings[id(flat.param)] = flat
            for listing in flat.listings:
                self._listings[id(listing.param)] = listing

    def slot(self, param: torch.Tensor, what: str, copies: tuple[int, ...] | None = None) -> Slot:
        """Finds what a parameter of an optimizer stands for.

        Args:
            what: is said in errors.
            copies: of what is no shard; default those of the model.
        """
        listing: Registered | None = self._listings.get(id(param), shard_behind(param))
        if listing is not None and id(listing.flat) in self._of_flat:
            return self._of_shard(param, listing)
        name = self._of_param.get(id(param))
        if name is None:
            raise ConfigurationError(
                f"{what} (shape {tuple(param.shape)}) is none of the model's: checkpoints keep optimizer state by the "
                "model's names. Pass as model= the module whose parameters the optimizer has (several: "
                "nn.ModuleDict)"
            )
        span = Span(name, param.shape, None, True)
        return Slot(param, (span,), False, self.model.same if copies is None else copies)

    def _of_shard(self, param: torch.Tensor, listing: Registered) -> Slot:
        names, slot = self._of_flat[id(listing.flat)], slot_of(listing)
        numbered = enumerate(slot.spans, listing.first)
        spans = tuple(span._replace(name=names[k]) for k, span in numbered if k in names)
        alone = listing.first if isinstance(listing, RegisteredShard) else None
        copies = self.model.copies_of(listing.flat, alone)
        return replace(slot, param=param, spans=spans, is_shard=not is_dtensor(param), copies=copies)

    def group(self, params: Sequence[torch.Tensor], index: int) -> list[str]:
        """Returns the names of the parameters of a param group."""
        what = f"of the optimizer's group {index}"
        slots = [self.slot(p, f"parameter {k} {what}") for k, p in enumerate(params) if p not in given_way]
        return [name for slot in slots for name in slot.names]


class CompositeHolder(Holder):
    """Optimizers whose parameters have nothing in common: their states by name, their groups one after the other.

    That is what torch's ``get_state_dict(model, [first, second])`` makes of them.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = list(holders)
        self.names = self._holders[0].names
        seen: set[str] = set()
        for k, holder in enumerate(self._holders):
            names = {n for group in holder.groups() for n in group["params"]}
            if twice := sorted(seen & names):
                raise ConfigurationError(
                    f"optimizer {k} of the list has {twice[0]!r}, which one before it has too; a checkpoint keeps "
                    "optimizer state by the model's names, so each parameter can be in one of them"
                )
            seen |= names

    def states(self) -> list[tuple[Slot, StateDict]]:
        return [state for holder in self._holders for state in holder.states()]

    def groups(self) -> list[StateDict]:
        return [group for holder in self._holders for group in holder.groups()]

    def needed(self) -> list[Slot]:
        return [slot for holder in self._holders for slot in holder.needed()]

    def shards(self) -> list[Slot]:
        return [slot for holder in self._holders for slot in holder.shards()]

    def writers_of(self, group: int) -> tuple[int, ...]:
        for holder in self._holders:
            count = len(holder.groups())
            if group < count:
                return holder.writers_of(group)
            group -= count
        raise IndexError(group)

    def others(self) -> StateDict:
        return self._merged(lambda holder: holder.others())

    def named(self) -> dict[str, object]:
        return self._merged(lambda holder: holder.named())

    def _merged(self, part: Callable[[Holder], StateDict]) -> StateDict:
        merged: StateDict = {}
        for holder in self._holders:
            found = part(holder)
            if twice := sorted(merged.keys() & found.keys()):
                raise ConfigurationError(
                    f"two optimizers of the list keep state called {twice[0]!r} beside that of parameters; which is "
                    "whose would not be known. Save one of them in extra="
                )
            merged.update(found)
        return merged

    def unclaimed(self, others: Iterable[str], named: Iterable[str]) -> set[str]:
        return (set(others) - self.others().keys()) | (set(named) - self.named().keys())

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        rest, rest_of_groups = iter(states), iter(groups)
        for holder in self._holders:
            own = holder.others()
            holder.load(
                [next(rest) for _ in holder.needed()],
                [next(rest_of_groups) for _ in holder.groups()],
                {key: value for key, value in others.items() if key in own},
            )

    def load_named(self, found: Mapping[str, object]) -> None:
        for holder in self._holders:
            own = holder.named()
            holder.load_named({key: value for key, value in found.items() if key in own})


class Schedulers:
    """Several as one, in the order of the list."""

    def __init__(self, schedulers: Sequence[Stateful]) -> None:
        self._schedulers = list(schedulers)

    def state_dict(self) -> StateDict:
        return {str(k): s.state_dict() for k, s in enumerate(self._schedulers)}

    def load_state_dict(self, state: StateDict) -> None:
        for k, scheduler in enumerate(self._schedulers):
            scheduler.load_state_dict(state[str(k)])


def check_schedulers(given: Stateful | Sequence[Stateful], saved: StateDict, folder: str) -> None:
    """Refuses a list where one was saved, one where a list was, and lists of other lengths.

    Args:
        given: what is to be restored.
        saved: the state of one, or what :class:`Schedulers` has made of several.
    """
    is_list = isinstance(given, Sequence)
    was_list = list(saved) == [str(k) for k in range(len(saved))]  # a scheduler's own state has names
    here = f"a list of {len(given)}" if isinstance(given, Sequence) else "one"
    there = f"a list of {len(saved)}" if was_list else "one"
    if here != there and (is_list or saved):
        raise ConfigurationError(
            f"scheduler= is {here}, and {folder} was saved with {there}; pass what was passed then, in the same order"
        )


class PlainHolder(Holder):
    """An optimizer of torch's interface over parameters, shards or DTensors."""

    def __init__(self, optimizer: Optimizer, names: ParameterNames) -> None:
        super().__init__(optimizer, names)
        self._saved = optimizer.state_dict()
        if not {"state", "param_groups"} <= set(self._saved):
            raise ConfigurationError(
                f"the state of {type(optimizer).__name__} has {', '.join(self._saved)} and not 'state' and "
                "'param_groups': which parameter each part is of is not known. Pass the optimizer that it wraps as "
                "optimizer=, and what else it keeps in extra="
            )

    def _indexed(self) -> list[tuple[int, torch.Tensor]]:
        return [
            (index, param)
            for own, saved in zip(self.optimizer.param_groups, self._saved["param_groups"], strict=True)
            for index, param in zip(saved["params"], own["params"], strict=True)
            if param not in given_way
        ]

    def needed(self) -> list[Slot]:
        return [self.names.slot(p, f"parameter {k} of the optimizer") for k, p in self._indexed()]

    def shards(self) -> list[Slot]:
        return [slot for slot in self.needed() if slot.is_shard]

    def states(self) -> list[tuple[Slot, StateDict]]:
        state, slots = self._saved["state"], zip(self._indexed(), self.needed(), strict=True)
        return [(slot, state[k]) for (k, _), slot in slots if state.get(k)]

    def groups(self) -> list[StateDict]:
        found = []
        pairs = zip(self.optimizer.param_groups, self._saved["param_groups"], strict=True)
        for k, (own, saved) in enumerate(pairs):
            options = {key: v for key, v in options_of(saved).items() if key != NOTE}
            found.append({"params": self.names.group(own["params"], k), **options})
        return found

    def others(self) -> StateDict:
        return {k: v for k, v in self._saved.items() if k not in ("state", "param_groups")}

    def named(self) -> dict[str, object]:
        return {k: copy.deepcopy(v) for k, v in self._saved["state"].items() if isinstance(k, str)}

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        packed = {k: s for (k, _), s in zip(self._indexed(), states, strict=True) if s}
        pairs = zip(groups, self._saved["param_groups"], strict=True)
        made = [{**options, "params": saved["params"]} for options, saved in pairs]
        self.optimizer.load_state_dict({**others, "state": packed, "param_groups": made})


class OwnedHolder(Holder):
    """An OSS: each rank has the state of the parameters that it owns."""

    optimizer: OSS

    def __init__(self, optimizer: OSS, names: ParameterNames) -> None:
        super().__init__(optimizer, names)
        names.ranks.refuse_others("the state of the OSS", optimizer._group.ranks)

    def _slot(self, param: nn.Parameter) -> Slot:
        return self.names.slot(param, "a parameter of the OSS", self.names.ranks.alone)

    def _params(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def states(self) -> list[tuple[Slot, StateDict]]:
        copy_options(self.optimizer.param_groups, self.optimizer.optim.param_groups)
        owned = self.optimizer.placement.state_of_owned(self.optimizer.optim)
        return [(self._slot(p), owned[p]) for p in self._params() if p in owned]

    def groups(self) -> list[StateDict]:
        groups = enumerate(self.optimizer.param_groups)
        return [{"params": self.names.group(g["params"], k), **options_of(g)} for k, g in groups]

    def _needed(self) -> list[nn.Parameter]:
        """Lists at least one, by whose state others are shaped where all ranks run one program."""
        params = self._params()
        needed = [p for p in params if self.optimizer.placement.keeps_state_of(p)]
        return needed or [min(params, key=torch.Tensor.numel)]

    def needed(self) -> list[Slot]:
        return [self._slot(p) for p in self._needed()]

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        index = {p: i for i, p in enumerate(self._params())}
        pairs = zip(groups, self.optimizer.param_groups, strict=True)
        packed = [{**options, "params": [index[p] for p in own["params"]]} for options, own in pairs]
        state = {index[p]: s for p, s in zip(self._needed(), states, strict=True) if s}
        self.optimizer.take_state({"state": state, "param_groups": packed})
        for segment in self.optimizer.segments():
            segment.take_values()


class WholeHolder(Holder):
    """WholeParameters: pieces where every element is updated by itself, else whole parameters at their owners."""

    optimizer: WholeParameters

    def __init__(self, optimizer: WholeParameters, names: ParameterNames) -> None:
        super().__init__(optimizer, names)
        self._inners = optimizer.placed()

    def _slot(self, param: torch.Tensor, spans: Sequence[tuple[Part, Piece | None]]) -> Slot:
        return slot_of_parts(param, spans, self._copies(spans[0][0], spans[0][1] is None))

    def _copies(self, part: Part, whole: bool) -> tuple[int, ...]:
        if part.flat is None:
            return self.names.model.same
        if whole and part.flat.group.backend.even_shards_only:
            return self.names.ranks.everybody
        return self.names.model.copies_of(part.flat)

    def states(self) -> list[tuple[Slot, StateDict]]:
        return [
            (self._slot(param, spans), inner.optimizer.state[param])
            for inner in self._inners
            if inner.optimizer is not None
            for param, spans in inner.spans.items()
            if inner.optimizer.state.get(param)
        ]

    def groups(self) -> list[StateDict]:
        found = []
        for inner, group in zip(self._inners, self.optimizer.param_groups, strict=True):
            own = group if inner.optimizer is None else inner.optimizer.param_groups[0]
            found.append({"params": list(group["param_names"]), **options_of(group), **options_of(own)})
        return found

    def writers_of(self, group: int) -> tuple[int, ...]:
        """Finds, for classes that count steps in their groups, a rank that has parameters of the group."""
        for part in self._inners[group].members:
            if part.flat is None or part.flat.group.backend.even_shards_only:
                break
            owner = self.optimizer.owner_of(part.name)
            ranks = [piece.rank for piece in part.pieces] if owner is None else [owner]
            if ranks:
                here = part.flat.group.rank == ranks[0]
                return self.names.model.copies_of(part.flat) if here else ()
        return (0,)

    def named(self) -> dict[str, object]:
        return {}

    def needed(self) -> list[Slot]:
        return [self._slot(param, spans) for inner in self._inners for param, spans in inner.spans.items()]

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        rest = iter(states)
        by_inner: list[dict[int, StateDict]] = []
        for inner in self._inners:
            found = {k: next(rest) for k in range(len(inner.spans))}
            by_inner.append({k: state for k, state in found.items() if state})
        self.optimizer.take_states(by_inner, groups)


def holder_of(optimizer: Optimizer, names: ParameterNames) -> Holder:
    """Makes the adapter of an optimizer, without what wraps that."""
    inner = optimizer
    wrap = ("accelerate", "lightning")
    while isinstance(inner, AdaScale) or type(inner).__module__.partition(".")[0] in wrap:
        if isinstance(inner, AdaScale):
            # they are made at their first use, and a new one is to take those that were saved
            _ = inner._averages
        found = getattr(inner, "optimizer", None)
        if not isinstance(found, Optimizer):
            break
        inner = found
    if isinstance(inner, AdaScale):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}, expected a torch optimizer")
    if isinstance(inner, OSS):
        return OwnedHolder(inner, names)
    if isinstance(inner, WholeParameters):
        return WholeHolder(inner, names)
    return PlainHolder(inner, names)


# ------------------------------------------------------------ random numbers, and the place in the data, of each rank
class Stateful(Protocol):
    """The methods that schedulers, scalers and loaders have."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


@runtime_checkable
class TakesRankStates(Protocol):
    """A loader or sampler that goes on from the states of another number of ranks."""

    def load_rank_states(self, states: Sequence[StateDict], /) -> object:
        """Takes the states of all ranks that wrote a checkpoint, in the order of ranks; all ranks call it alike."""
        ...


def random_states(backend: Backend) -> StateDict:
    """Returns the states of Python, numpy if it was imported, torch on the host, and the device; as data."""
    found: StateDict = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(gauss))
    if backend.device_type != "cpu":
        found[backend.device_type] = to_cpu(backend.rng_state())
    return found


def set_random_states(backend: Backend, states: StateDict) -> None:
    """Does the reverse; generators of which nothing was saved stay as they are."""
    if "python" in states:
        version, inner, gauss = states["python"]
        random.setstate((version, tuple(inner), gauss))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, gauss = states["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), position, has_gauss, gauss))
    if backend.device_type != "cpu" and backend.device_type in states:
        backend.set_rng_state(states[backend.device_type])


def load_loader(loader: Stateful, states: Sequence[StateDict | None], world_size: int | None) -> None:
    """Gives a loader its rank's state, or what it can make of others'.

    Args:
        states: of all ranks that wrote the checkpoint; or its own alone.
        world_size: of those that restore; None: its own state is given.
    """
    there = [state for state in states if state is not None]
    if len(there) != len(states):
        raise ConfigurationError(
            "the checkpoint has no state of a loader: it was saved without loader=. Restore without it"
        )
    if world_size is None:
        loader.load_state_dict(there[0])
        return
    places = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    takes = next((place for place in places if isinstance(place, TakesRankStates)), None)
    if takes is not None:
        takes.load_rank_states(there)
    elif all(equal(state, there[0]) for state in there):
        loader.load_state_dict(there[0])
    else:
        raise ConfigurationError(
            f"the checkpoint has the places in the data of {len(there)} ranks, each its own, and {world_size} ranks "
            f"restore it: {type(loader).__name__} has no load_rank_states(states) that says how they go on. Restore "
            "with as many ranks, use a sampler that counts samples over all ranks, or restore without loader= (the "
            "epoch begins anew)"
        )


def equal(a: Tree, b: Tree) -> bool:
    """Says whether two values are the same, tensors and arrays in containers of theirs too; NaN is the same as NaN."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__module__ == "numpy" and hasattr(a, "tobytes"):
        kinds = (getattr(a, "dtype", None), getattr(a, "shape", None))
        return kinds == (getattr(b, "dtype", None), getattr(b, "shape", None)) and a.tobytes() == b.tobytes()
    try:
        return type(a) is type(b) and (bool(a == b) or (isinstance(a, float) and repr(a) == repr(b)))
    except (TypeError, ValueError, RuntimeError):
        return False
