"""Tensors of a checkpoint as one rank has them, and what an optimizer's parameter stands for.

A *leaf* is boxes of a whole tensor, and the ranks that have the same ones. A *slot* is what an optimizer lists: which
of the model's parameters, and which elements of them. An optimizer over flat shards has state that is laid out as the
shard: of each parameter in it a piece. Everything else that an optimizer keeps is a parameter's as a whole.

[Note: copies] Each box is written once. Every rank knows without asking which ranks have the same boxes: layouts of
shards, replicas and placements are known everywhere. Such ranks take turns, so that all write about the same number of
bytes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import Group
from ..errors import ConfigurationError
from ..layout import Box, Piece, boxes_of_piece, whole_box
from ..torch_seams.dtensors import is_dtensor
from ..torch_seams.tensors import MarkedTensor
from ..types import SavedState, StateDict
from .kinds import is_elementwise

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor of a state dict.

    Attributes:
        shape: of the whole tensor.
        base: what this rank has of it, with other things beside where boxes say so.
        boxes: parts of the whole; each one's elements lie in ``base``, from ``start`` on.
        copies: ranks of the group that have the same boxes, this one among them.
    """

    shape: torch.Size
    base: torch.Tensor
    boxes: tuple[Box, ...]
    copies: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Counts the elements that this rank has."""
        return sum(box.numel for box in self.boxes)

    def values(self, box: Box) -> torch.Tensor:
        """Returns a view of the base, in the box's shape; a copy of one whose elements lie scattered."""
        if box.sizes == tuple(self.base.shape):
            return self.base
        return self.base.reshape(-1)[box.start : box.start + box.numel].view(box.sizes)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A value that is no tensor, or is stored as one record whatever it is.

    Attributes:
        copies: ranks that have the same.
    """

    value: object
    copies: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that write or read a checkpoint together.

    Attributes:
        group: None for one process alone.
        rank: this one's place.
        world: of each member the number in the whole job.
    """

    group: Group | None
    rank: int
    world: tuple[int, ...]

    @classmethod
    def of(cls, group: Group | None) -> Ranks:
        return cls(None, 0, (0,)) if group is None else cls(group, group.rank, group.ranks)

    @property
    def size(self) -> int:
        return len(self.world)

    @property
    def everybody(self) -> tuple[int, ...]:
        """Lists the places of all of them."""
        return tuple(range(self.size))

    @property
    def alone(self) -> tuple[int, ...]:
        return (self.rank,)

    def places(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Finds the places among these of ranks of the whole job."""
        place = {rank: k for k, rank in enumerate(self.world)}
        return tuple(sorted(place[rank] for rank in ranks if rank in place))

    def refuse_others(self, name: str, ranks: Sequence[int]) -> None:
        """Raises where a tensor is spread over other ranks than these."""
        if set(ranks) == set(self.world):
            return
        raise ConfigurationError(
            f"{name!r} is spread over ranks {sorted(ranks)}, and ranks {sorted(self.world)} take part in this "
            "checkpoint: others may hold something else under the same name (experts, stages of a pipeline, tensor "
            "parallelism). Pass group= with the ranks that the model is sharded over, and a folder of its own for each "
            "such group; or replicas= when sharding, if they hold the same"
        )


def whole(tensor: torch.Tensor, copies: tuple[int, ...]) -> Leaf:
    """Returns a tensor that this rank has all of."""
    values = tensor.detach()
    return Leaf(values.shape, values, (whole_box(values.shape),), copies)


def piece_of(shape: torch.Size, shard: torch.Tensor, piece: Piece | None, copies: tuple[int, ...]) -> Leaf:
    """Returns a parameter's part in a shard [S], or in something that is laid out as one.

    Args:
        piece: None if nothing of it lies there; what has no elements at all lies nowhere, and is written too.
    """
    if not shape.numel():
        return Leaf(shape, shard.new_empty(shape), (whole_box(shape),), copies)
    return Leaf(shape, shard, () if piece is None else tuple(boxes_of_piece(shape, piece)), copies)


def of_dtensor(name: str, tensor: DTensor, ranks: Ranks) -> Leaf:
    """Returns this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, values = tensor.device_mesh, tensor.to_local().detach()
    ranks.refuse_others(name, mesh.mesh.flatten().tolist())
    if any(p.is_partial() for p in tensor.placements):
        raise ConfigurationError(f"{name!r} is a DTensor of partial sums; redistribute() it first")
    mine = mesh.get_coordinate()
    if mine is None:
        raise ConfigurationError(f"{name!r} is a DTensor over a mesh that this rank is not in")
    same = mesh.mesh
    for dim, (placement, at) in enumerate(zip(tensor.placements, mine, strict=True)):
        if not placement.is_replicate():
            same = same.narrow(dim, at, 1)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    box = Box(tuple(offsets), tuple(sizes))
    boxes = () if 0 in box.sizes and tensor.numel() else (box,)
    return Leaf(tensor.shape, values, boxes, ranks.places(same.flatten().tolist()))


def refuse_class(name: str, tensor: torch.Tensor) -> NoReturn:
    """Raises for a class of tensors that a checkpoint has no place for."""
    raise ConfigurationError(
        f"{name!r} is a {type(tensor).__name__}, which is more than one plain tensor, and checkpoints hold plain ones: "
        "save what it consists of in extra="
    )


# ------------------------------------------------------------ slots
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
                many = isinstance(value, torch.Tensor) and value.numel() != 1
                if self.is_shard and (many or isinstance(value, dict | list | tuple)):
                    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                    raise ConfigurationError(
                        f"optimizer state {key!r} of the shard of {', '.join(self.names[:3])} is a "
                        f"{type(value).__name__}{shape}, neither laid out as the shard ({tuple(self.param.shape)}) "
                        "nor one number: what it says of which parameter is not known here. Use "
                        "shardkit.WholeParameters for this optimizer, whose state is kept by whole parameters"
                    )
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
