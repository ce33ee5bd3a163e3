"""Optimizers as checkpoints see them: slots with their state, and groups by the model's names."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..fsdp.originals import Listing
from ..fsdp.registered_shard import RegisteredShard
from ..optimizers.shards import shard_behind
from ..torch_seams.dtensors import is_dtensor
from ..types import StateDict, Tree
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

    def shards(self) -> list[Slot]:
        """Slots that are shards, where a rank may lack state that others have; the same ones on all ranks."""
        return []

    def writers_of(self, group: int) -> tuple[int, ...]:
        """Ranks whose options of a group count."""
        return (0,)

    def others(self) -> StateDict:
        """Entries beside state and groups."""
        return {}

    def unclaimed(self, others: Iterable[str], named: Iterable[str]) -> set[str]:
        """Which of what a checkpoint has as :meth:`others` and :meth:`named` nobody here would take."""
        return set()

    def named(self) -> dict[str, object]:
        """State under names of its own, alike on all ranks (AdaScale's averages)."""
        state: Tree = self.optimizer.state
        return {k: copy.deepcopy(v) for k, v in state.items() if isinstance(k, str)}

    def load_named(self, found: Mapping[str, object]) -> None:
        """Puts :meth:`named` back."""
        state: Tree = self.optimizer.state
        state.update(found)


class Names:
    """Which of the model's parameters a parameter of an optimizer stands for.

    Attributes:
        frozen: names of those that don't train.
    """

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self.ranks = model.ranks
        self._of_flat: dict[int, dict[int, str]] = {}
        self._of_param: dict[int, str] = {}
        self._listings: dict[int, Listing] = {}
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
        """What a parameter of an optimizer stands for.

        Args:
            what: is said in errors.
            copies: of what is no shard; default those of the model.
        """
        listing: Listing | None = self._listings.get(id(param), shard_behind(param))
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

    def _of_shard(self, param: torch.Tensor, listing: Listing) -> Slot:
        spans, flat = [], listing.flat
        alone = listing.first if isinstance(listing, RegisteredShard) else None
        for number, name in sorted(self._of_flat[id(flat)].items()):
            if alone not in (None, number):
                continue
            shape = flat.originals[number].shape
            piece = self.model.piece(flat, number)
            begins = piece is not None and piece.start == 0
            answers = begins or (not shape.numel() and flat.group.rank == 0)
            if piece is not None and isinstance(listing, RegisteredShard):  # within what is listed
                piece = replace(piece, offset=piece.offset - listing.offset)
            spans.append(Span(name, shape, piece, answers))
        is_shard = not is_dtensor(param)
        return Slot(param, tuple(spans), is_shard, self.model.copies_of(flat, alone))

    def group(self, params: Sequence[torch.Tensor], index: int) -> list[str]:
        """Of a param group's parameters the names."""
        return [
            n
            for k, p in enumerate(params)
            for n in self.slot(p, f"parameter {k} of the optimizer's group {index}").names
        ]
