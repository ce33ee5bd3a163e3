"""Tensors of a checkpoint as one rank has them: boxes of whole tensors, and which ranks have the same ones.

[Note: copies] Each box is written once. Every rank knows without asking which ranks have the same boxes: layouts of
shards, replicas and placements are known everywhere. Such ranks take turns, so that all write about the same number of
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from ..backend import Group
from ..errors import ConfigurationError
from ..layout import Box, Piece, boxes_of_piece, whole_box

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
