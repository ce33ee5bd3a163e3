"""Optimizers of each kind: what state this rank has, and how it takes what was read."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks import copy_options, options_of
from ..errors import ConfigurationError
from ..fsdp.state_of_shards import NOTE
from ..layout import Piece
from ..oss.optimizer import OSS
from ..training.adascale import AdaScale
from ..training.whole_parameters.listed import Part
from ..training.whole_parameters.optimizer import WholeParameters
from ..types import StateDict
from .optimizer_state import Holder, Names
from .slots import Slot, Span


class Plain(Holder):
    """An optimizer of torch's interface over parameters, shards or DTensors."""

    def __init__(self, optimizer: Optimizer, names: Names) -> None:
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
        ]

    def needed(self) -> list[Slot]:
        return [self.names.slot(p, f"parameter {k} of the optimizer") for k, p in self._indexed()]

    def shards(self) -> list[Slot]:
        return [slot for slot in self.needed() if slot.is_shard]

    def states(self) -> list[tuple[Slot, StateDict]]:
        state = self._saved["state"]
        return [
            (slot, state[k])
            for (k, _), slot in zip(self._indexed(), self.needed(), strict=True)
            if state.get(k)
        ]

    def groups(self) -> list[StateDict]:
        found = []
        for k, (own, saved) in enumerate(
            zip(self.optimizer.param_groups, self._saved["param_groups"], strict=True)
        ):
            options = {key: v for key, v in options_of(saved).items() if key != NOTE}
            found.append({"params": self.names.group(own["params"], k), **options})
        return found

    def others(self) -> StateDict:
        return {k: v for k, v in self._saved.items() if k not in ("state", "param_groups")}

    def named(self) -> dict[str, object]:
        return {k: copy.deepcopy(v) for k, v in self._saved["state"].items() if isinstance(k, str)}

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        packed = {k: s for (k, _), s in zip(self._indexed(), states, strict=True) if s}
        made = [
            {**options, "params": saved["params"]}
            for options, saved in zip(groups, self._saved["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({**others, "state": packed, "param_groups": made})


class Owned(Holder):
    """An OSS: each rank has the state of the parameters that it owns."""

    optimizer: OSS

    def __init__(self, optimizer: OSS, names: Names) -> None:
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
        return [
            {"params": self.names.group(g["params"], k), **options_of(g)}
            for k, g in enumerate(self.optimizer.param_groups)
        ]

    def _needed(self) -> list[nn.Parameter]:
        """At least one, by whose state others are shaped where all ranks run one program."""
        params = self._params()
        needed = [p for p in params if self.optimizer.placement.keeps_state_of(p)]
        return needed or [min(params, key=torch.Tensor.numel)]

    def needed(self) -> list[Slot]:
        return [self._slot(p) for p in self._needed()]

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        index = {p: i for i, p in enumerate(self._params())}
        packed = [
            {**options, "params": [index[p] for p in own["params"]]}
            for options, own in zip(groups, self.optimizer.param_groups, strict=True)
        ]
        state = {index[p]: s for p, s in zip(self._needed(), states, strict=True) if s}
        self.optimizer.take_state({"state": state, "param_groups": packed})
        for segment in self.optimizer.segments():
            segment.take_values()


class Whole(Holder):
    """WholeParameters: pieces where every element is updated by itself, else whole parameters at their owners."""

    optimizer: WholeParameters

    def __init__(self, optimizer: WholeParameters, names: Names) -> None:
        super().__init__(optimizer, names)
        self._inners = optimizer.placed()

    def _slot(self, param: torch.Tensor, spans: Sequence[tuple[Part, Piece | None]]) -> Slot:
        found = [
            Span(part.name, part.shape, piece, piece is None or piece.start == 0) for part, piece in spans
        ]
        return Slot(
            param, tuple(found), spans[0][1] is not None, self._copies(spans[0][0], spans[0][1] is None)
        )

    def _copies(self, part: Part, whole: bool) -> tuple[int, ...]:
        if part.flat is None:
            return self.names.model.same
        if whole and part.flat.group.backend.even_shards_only:
            return self.names.ranks.everybody
        return self.names.model.copies_of(part.flat, None if whole else part.number)

    def states(self) -> list[tuple[Slot, StateDict]]:
        return [
            (self._slot(param, spans), inner.optimizer.state[param])
            for inner in self._inners
            if inner.optimizer is not None
            for param, spans in zip(inner.params, inner.spans, strict=True)
            if inner.optimizer.state.get(param)
        ]

    def groups(self) -> list[StateDict]:
        found = []
        for inner, group in zip(self._inners, self.optimizer.param_groups, strict=True):
            own = group if inner.optimizer is None else inner.optimizer.param_groups[0]
            found.append({"params": list(group["param_names"]), **options_of(group), **options_of(own)})
        return found

    def writers_of(self, group: int) -> tuple[int, ...]:
        """Some classes count steps in their groups: a rank that has parameters of the group."""
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
        return [
            self._slot(param, spans)
            for inner in self._inners
            for param, spans in zip(inner.params, inner.spans, strict=True)
        ]

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        rest = iter(states)
        by_inner: list[dict[int, StateDict]] = []
        for inner in self._inners:
            found = {k: next(rest) for k in range(len(inner.params))}
            by_inner.append({k: state for k, state in found.items() if state})
        self.optimizer.take_states(by_inner, groups)


def holder_of(optimizer: Optimizer, names: Names) -> Holder:
    """The optimizer, without what wraps it.

    Raises:
        ConfigurationError: it is of a kind whose state is not known here.
    """
    inner = optimizer
    while isinstance(inner, AdaScale) or type(inner).__module__.partition(".")[0] in (
        "accelerate",
        "lightning",
    ):
        if isinstance(inner, AdaScale):
            _ = (
                inner._averages
            )  # they are made at their first use, and a new one is to take those that were saved
        found = getattr(inner, "optimizer", None)
        if not isinstance(found, Optimizer):
            break
        inner = found
    if isinstance(inner, AdaScale):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}, expected a torch optimizer")
    if isinstance(inner, OSS):
        return Owned(inner, names)
    if isinstance(inner, WholeParameters):
        return Whole(inner, names)
    return Plain(inner, names)
