"""Optimizers as checkpoints see them: slots with their state, and groups by the model's names."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..adascale.optimizer import AdaScale
from ..errors import ConfigurationError
from ..fsdp.flat_param import FlatParam
from ..fsdp.state_of_shards import NOTE
from ..optimizers.shards import shard_behind
from ..oss.optimizer import OSS
from ..oss.param_groups import copy_options, options_of
from ..types import StateDict, Tree
from .leaves import Ranks
from .model_state import ModelState
from .slots import Slot, Span


class Holder(abc.ABC):
    """An optimizer, whatever spreads its state.

    Args:
        optimizer: without what wraps it.
        names: of the model's parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Names) -> None:
        self.optimizer = optimizer
        self.names = names

    @abc.abstractmethod
    def states(self) -> list[tuple[Slot, StateDict]]:
        """What this rank answers for (its copies, too)."""

    @abc.abstractmethod
    def groups(self) -> list[StateDict]:
        """Param groups, with names in place of parameters."""

    @abc.abstractmethod
    def needed(self) -> list[Slot]:
        """What state this rank's optimizer needs."""

    @abc.abstractmethod
    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        """Takes the state of each needed slot, each group's options, and what else there is."""

    def others(self) -> StateDict:
        """Entries beside state and groups."""
        return {}

    def named(self) -> dict[str, object]:
        """State under names of its own, alike on all ranks (AdaScale's averages)."""
        state: Tree = self.optimizer.state
        return {k: copy.deepcopy(v) for k, v in state.items() if isinstance(k, str)}

    def load_named(self, found: Mapping[str, object]) -> None:
        """Puts :meth:`named` back."""
        state: Tree = self.optimizer.state
        state.update(found)


class Names:
    """Which of the model's parameters a parameter of an optimizer stands for."""

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self.ranks = model.ranks
        self._of_flat: dict[int, dict[int, str]] = {}
        self._of_param: dict[int, str] = {}
        self._flats: dict[int, FlatParam] = {}
        for name, param, flat, number in model.parameters():
            if flat is None:
                self._of_param.setdefault(id(param), name)
                continue
            self._of_flat.setdefault(id(flat), {}).setdefault(number, name)
            self._flats[id(flat.param)] = self._flats[id(flat.listed)] = flat

    def slot(self, param: torch.Tensor, what: str, copies: tuple[int, ...] | None = None) -> Slot:
        """What a parameter of an optimizer stands for.

        Args:
            what: is said in errors.
            copies: of what is no shard; default all ranks.
        """
        flat = self._flats.get(id(param), shard_behind(param))
        if flat is not None and id(flat) in self._of_flat:
            return self._of_shard(param, flat)
        name = self._of_param.get(id(param))
        if name is None:
            raise ConfigurationError(
                f"{what} (shape {tuple(param.shape)}) is none of the model's: checkpoints keep optimizer state by the "
                "model's names. Pass as model= the module whose parameters the optimizer has (several: "
                "nn.ModuleDict)"
            )
        span = Span(name, param.shape, None, True)
        return Slot(param, (span,), False, self.ranks.everybody if copies is None else copies)

    def _of_shard(self, param: torch.Tensor, flat: FlatParam) -> Slot:
        spans = []
        for number, name in sorted(self._of_flat[id(flat)].items()):
            shape = flat.originals[number].shape
            piece = self.model.piece(flat, number)
            begins = piece is not None and piece.start == 0
            answers = begins or (not shape.numel() and flat.group.rank == 0)
            spans.append(Span(name, shape, piece, answers))
        return Slot(param, tuple(spans), param is flat.param, self.model.copies_of(flat))

    def group(self, params: Sequence[torch.Tensor], index: int) -> list[str]:
        """Of a param group's parameters the names."""
        return [
            n
            for k, p in enumerate(params)
            for n in self.slot(p, f"parameter {k} of the optimizer's group {index}").names
        ]


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


def holder_of(optimizer: Optimizer, model: ModelState) -> Holder:
    """The optimizer, without what wraps it.

    Raises:
        ConfigurationError: it is of a kind whose state is not known here.
    """
    inner = optimizer
    while isinstance(inner, AdaScale) or type(inner).__module__.partition(".")[0] in (
        "accelerate",
        "lightning",
    ):
        found = getattr(inner, "optimizer", None)
        if not isinstance(found, Optimizer):
            break
        inner = found
    if isinstance(inner, AdaScale):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}, expected a torch optimizer")
    names = Names(model)
    if isinstance(inner, OSS):
        return Owned(inner, names)
    return Plain(inner, names)


def ranks_of(holder: Holder) -> Ranks:
    """Those that save or restore."""
    return holder.names.ranks
