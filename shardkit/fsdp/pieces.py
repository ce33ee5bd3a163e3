"""Shards as ``torch.distributed.checkpoint`` (DCP) writes and reads them: nothing is gathered.

[Note: pieces] A rank's shard of a flat parameter has a run of elements of some original parameters. Of a parameter with
several dimensions a run is no box, but at most two for each dimension less one more: the end of a row, whole rows, the
beginning of one (and so on within these). DCP's format knows boxes alone, and asks a tensor for its own by the methods
of its protocol ``_Checkpointable``. What it reads is copied into the boxes, which are views of the shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..layout import Box, boxes_of
from ..types import Args, Kwargs
from .flat_param import FlatParam
from .names import plain_name
from .state import ShardingState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Pieces(torch.Tensor):
    """Stands for a whole parameter in a state dict for DCP, and has this rank's part of it.

    Shape and dtype are the parameter's; it has no values that an operation could use.
    """

    _boxes: list[Box]
    _run: torch.Tensor  # [n], a view of the shard

    @staticmethod
    def __new__(cls, shape: torch.Size, run: torch.Tensor, first: int) -> Pieces:
        """Of a parameter of this shape, the elements from number ``first`` on, which are ``run`` [n]."""
        made: Pieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=run.dtype, device=run.device)
        made._run, made._boxes = run, boxes_of(shape, first, run.numel())
        return made

    def __init__(self, shape: torch.Size, run: torch.Tensor, first: int) -> None:
        """Made in ``__new__``, as tensors are."""

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {self.dtype}, {self._run.numel()} elements on this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> NoReturn:
        raise LifecycleError(
            f"{func}: a sharded state dict is for torch.distributed.checkpoint alone, and a tensor in it has this "
            "rank's part of a parameter. For values call state_dict(), on all ranks"
        )

    # ------------------------------------------------------------ DCP's protocol
    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._run)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets = tuple(index.offset or ())
        box = next(b for b in self._boxes if b.offsets == offsets)
        return self._run[box.start : box.start + box.numel].view(box.sizes)


def sharded_state_dict(state: ShardingState) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model under their own names, for DCP: of what is sharded, this rank's pieces.

    Raises:
        ConfigurationError: a parameter that was wrapped on the meta device has no values yet.
    """
    found: dict[str, torch.Tensor] = {}
    paths = {id(m): name for name, m in state.door.named_modules()}
    for unit in state.states():
        before = paths[id(unit.door)]
        for flat in unit.flats:
            for name, pieces in _pieces_of(flat):
                found[_name(before, name)] = pieces
        for source, name in unit.shared_paths:
            first = _name(before, source)
            if first in found:
                found[_name(before, name)] = found[first]
    listed = {id(listing.param) for listing in state.all_listings()}
    found.update((name, t) for name, t in _unsharded(state.door, listed) if name not in found)
    return found


def _name(path: str, name: str) -> str:
    return plain_name(f"{path}.{name}" if path else name)


def _pieces_of(flat: FlatParam) -> Iterator[tuple[str, Pieces]]:
    if flat.param.is_meta:
        raise ConfigurationError(
            f"{flat.names[0]!r} has no values yet: it was wrapped on the meta device. Call to_empty(device=...) first"
        )
    shard = flat.param.detach().view(-1)
    here = {p.item: p for p in flat.layout.pieces() if p.rank == flat.group.rank}
    for item, (name, original) in enumerate(zip(flat.names, flat.originals, strict=True)):
        piece = here.get(item)
        run = shard[:0] if piece is None else shard[piece.offset : piece.offset + piece.numel]
        yield name, Pieces(original.shape, run, 0 if piece is None else piece.start)


def _unsharded(door: nn.Module, shards: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, m in door.named_modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and name not in m._non_persistent_buffers_set:
                yield _name(path, name), buffer
        for name, param in m._parameters.items():
            if param is not None and id(param) not in shards:
                yield _name(path, name), param.detach()
