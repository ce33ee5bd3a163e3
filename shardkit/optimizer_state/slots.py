"""Maps an optimizer's parameter to what it stands for: which of the model's parameters, and which elements of them.

An optimizer over flat shards has state that is laid out as the shard: of each parameter in it a piece. Everything else
that an optimizer keeps is a parameter's as a whole.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import Group
from ..errors import ConfigurationError
from ..layout import Piece
from ..torch_seams.dtensors import is_dtensor
from ..torch_seams.tensor_facts import MarkedTensor
from ..types import SavedState, StateDict
from .kinds import is_elementwise
from .leaves import Fixed, Leaf, Ranks, of_dtensor, piece_of, refuse_class, whole


class Span(NamedTuple):
    """One of the model's parameters in a slot.

    Attributes:
        name: as the model was written.
        piece: what of it lies in the slot; None for nothing.
        answers: this rank (and its copies) keeps what is one number for the parameter.
    """

    name: str
    shape: torch.Size
    piece: Piece | None
    answers: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A parameter as an optimizer lists it.

    Attributes:
        param: what is listed.
        spans: what it stands for.
        is_shard: a flat tensor with pieces of parameters; else one parameter as a whole, or a DTensor of it.
        copies: ranks that have the same.
        group: ranks that have the other parts of a shard.
        join: gathers a tensor that is laid out as the shard into one of each parameter (collective); on the CPU, and
            empty where its second argument is False.
        owners: of each parameter the rank in the group whose numbers count; None: they are the same on all.
    """

    param: torch.Tensor
    spans: tuple[Span, ...]
    is_shard: bool
    copies: tuple[int, ...] = ()
    group: Group | None = None
    join: Callable[[torch.Tensor, bool], list[torch.Tensor]] | None = None
    owners: Sequence[int] | None = None

    @property
    def names(self) -> list[str]:
        """Returns the names of the parameters in this slot."""
        return [span.name for span in self.spans]

    @property
    def world_size(self) -> int:
        """Counts the ranks that have parts of it."""
        return 1 if self.group is None else self.group.world_size

    # ------------------------------------------------------------ whole states
    def cut(self, have: Mapping[str, SavedState]) -> StateDict:
        """Cuts this slot's state out of whole parameters' states, by name; where one has none, zeros."""
        if not self.is_shard:
            return copy.deepcopy(dict(have[self.spans[0].name]))
        there = [(span, have[span.name]) for span in self.spans if have.get(span.name)]
        self._check_cut(there)
        made: StateDict = {}
        for key, value in there[0][1].items():
            if not all(is_elementwise(key, state[key], span.shape) for span, state in there):
                made[key] = copy.copy(value)
                continue
            laid = value.new_zeros(self.param.numel())
            for (_, _, piece, _), state in there:
                if piece is not None:
                    own = state[key].detach().reshape(-1)[piece.start : piece.start + piece.numel]
                    laid[piece.offset : piece.offset + piece.numel] = own
            made[key] = laid.view(self.param.shape)
        return made

    def _check_cut(self, there: Sequence[tuple[Span, SavedState]]) -> None:
        keys = {key for _, state in there for key in state}
        for span, state in there:
            for key in sorted(keys - set(state), key=str):
                raise ConfigurationError(
                    f"the optimizer state of {span.name!r} lacks {key!r}, which others of its flat parameter have"
                )
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != span.shape:
                    raise ConfigurationError(
                        f"optimizer state {key!r} of {span.name!r} has shape {tuple(value.shape)}, expected "
                        f"{tuple(span.shape)}; nothing was loaded. This state is of another model: wrap the model as "
                        "it was when the state was saved"
                    )

    # ------------------------------------------------------------ what is there
    def leaves(self, state: StateDict, ranks: Ranks) -> dict[str, dict[str, Leaf | Fixed]]:
        """Returns a state by the parameters' names."""
        found: dict[str, dict[str, Leaf | Fixed]] = {span.name: {} for span in self.spans}
        for key, value in state.items():
            if isinstance(value, MarkedTensor):
                value = value.as_subclass(torch.Tensor)
            if is_dtensor(value):
                found[self.spans[0].name][key] = of_dtensor(f"optimizer state {key!r}", value, ranks)
            elif self.is_shard and is_elementwise(key, value, self.param.shape):
                value = value.detach()  # one object: what lies together is copied together
                for span in self.spans:
                    found[span.name][key] = self._piece(span, value)
            else:
                self._check_number(key, value)
                for span in self.spans:
                    if span.answers:
                        found[span.name][key] = self._whole(key, value)
        return found

    def _piece(self, span: Span, value: torch.Tensor) -> Leaf:
        return piece_of(
            span.shape, value.detach(), span.piece, self.copies if span.shape.numel() or span.answers else ()
        )

    def _whole(self, key: str, value: object) -> Leaf | Fixed:
        if not isinstance(value, torch.Tensor):
            return Fixed(value, self.copies)
        if is_traceable_wrapper_subclass(value) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            refuse_class(f"optimizer state {key!r} of {self.names[0]}", value)
        return whole(value, self.copies)

    def _check_number(self, key: str, value: object) -> None:
        many = isinstance(value, torch.Tensor) and value.numel() != 1
        if self.is_shard and (many or isinstance(value, dict | list | tuple)):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ConfigurationError(
                f"optimizer state {key!r} of the shard of {', '.join(self.names[:3])} is a {type(value).__name__}"
                f"{shape}, neither laid out as the shard ({tuple(self.param.shape)}) nor one number: what it says of "
                "which parameter is not known here. Use shardkit.WholeParameters for this optimizer, whose state is "
                "kept by whole parameters"
            )

    # ------------------------------------------------------------ what is to come
    def is_cut(self, key: str, span: Span, shape: torch.Size) -> bool:
        """Says whether a state that was saved in a shape has one element for each of a parameter's, and is cut here."""
        if not self.is_shard and not is_dtensor(self.param):
            return False
        return shape == span.shape and is_elementwise(key, torch.empty(shape, device="meta"), span.shape)

    def zeros(self, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros_like(self.param.detach(), dtype=dtype)

    def wanted(self, span: Span, value: torch.Tensor, ranks: Ranks) -> Leaf:
        """Returns the leaf that fills what :meth:`zeros` has made, of one parameter."""
        if is_dtensor(value):
            return of_dtensor(f"optimizer state of {span.name}", value, ranks)
        return self._piece(span, value)
