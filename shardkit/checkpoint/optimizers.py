"""Optimizers as checkpoints see them: slots with their state, and groups by the model's names."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..fsdp.flat_param import Registered, RegisteredShard
from ..fsdp.state_dict import slot_of, written_parameters
from ..layout import Piece
from ..optimizer_state.forms import NOTE
from ..optimizer_state.kinds import Slot, Span
from ..optimizers.shards import copy_options, given_way, options_of, shard_behind
from ..oss.optimizer import OSS
from ..torch_seams.tensors import is_dtensor
from ..training.adascale import AdaScale
from ..training.whole_parameters.exchange import Part
from ..training.whole_parameters.optimizer import WholeParameters
from ..training.whole_parameters.optimizer import slot_of as slot_of_parts
from ..types import StateDict, Tree
from .model_state import ModelState
from .rank_states import Stateful


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
        for name, param, flat, number in written_parameters(model.module):
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
            names, slot = self._of_flat[id(listing.flat)], slot_of(listing)
            numbered = enumerate(slot.spans, listing.first)
            spans = tuple(span._replace(name=names[k]) for k, span in numbered if k in names)
            alone = listing.first if isinstance(listing, RegisteredShard) else None
            same = self.model.copies_of(listing.flat, alone)
            return replace(slot, param=param, spans=spans, is_shard=not is_dtensor(param), copies=same)
        if (name := self._of_param.get(id(param))) is None:
            raise ConfigurationError(
                f"{what} (shape {tuple(param.shape)}) is none of the model's: checkpoints keep optimizer state by the "
                "model's names. Pass as model= the module whose parameters the optimizer has (several: "
                "nn.ModuleDict)"
            )
        span = Span(name, param.shape, None, True)
        return Slot(param, (span,), False, self.model.same if copies is None else copies)

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
        for segment in self.optimizer.placement.segments:
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
            by_inner.append({k: state for k in range(len(inner.spans)) if (state := next(rest))})
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
    if not isinstance(inner, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}, expected a torch optimizer")
    if isinstance(inner, OSS):
        return OwnedHolder(inner, names)
    if isinstance(inner, WholeParameters):
        return WholeHolder(inner, names)
    return PlainHolder(inner, names)
