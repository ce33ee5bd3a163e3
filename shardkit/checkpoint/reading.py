"""Fills leaves with what a checkpoint has of them, whoever wrote which part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import ConfigurationError
from ..fsdp.pieces import Box
from .format.records import read_tensor
from .leaves import Leaf

if TYPE_CHECKING:
    from .format.metadata import Chunk, Record
    from .format.stored import Stored


class Wanted(NamedTuple):
    """A tensor that is to be filled.

    Attributes:
        name: in the checkpoint.
        leaf: where its values go.
    """

    name: str
    leaf: Leaf


class _Copy(NamedTuple):
    """Where a stored chunk and a box meet: (first, size) of each dimension in both."""

    leaf: Leaf
    box: Box
    chunk: Chunk
    first: tuple[int, ...]
    sizes: tuple[int, ...]


class Reads:
    """What of a checkpoint this rank reads.

    Args:
        wanted: all of it.

    Raises:
        ConfigurationError: a tensor has another shape in the checkpoint, or is not in it.
    """

    def __init__(self, stored: Stored, wanted: Iterable[Wanted]) -> None:
        self._stored = stored
        self._copies: dict[Record, list[_Copy]] = {}
        for name, leaf in wanted:
            found = stored.tensors[name]
            if found.shape != leaf.shape:
                raise ConfigurationError(
                    f"{name!r} has shape {tuple(found.shape)} in {stored.folder}, and {tuple(leaf.shape)} here; "
                    "nothing was restored"
                )
            for box in leaf.boxes:
                for chunk in found.chunks:
                    met = _meet(box, chunk)
                    if met is not None:
                        self._copies.setdefault(chunk.record, []).append(_Copy(leaf, box, chunk, *met))

    @property
    def records(self) -> Iterator[Record]:
        """The records that are read."""
        return iter(self._copies)

    @torch.no_grad()
    def run(self) -> None:
        """Reads them, each once, in the order in which they lie."""
        for record in sorted(self._copies):
            copies, name = self._copies[record], f"{self._stored.folder}: {record.name} in {record.file}"
            tensor = read_tensor(name, self._stored.read(record), copies[0].chunk.sizes)
            for copy in copies:
                _fill(copy, tensor)


def _meet(box: Box, chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    first = tuple(max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True))
    ends = [
        min(a + m, b + n)
        for a, m, b, n in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(first, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else (first, sizes)


def _fill(copy: _Copy, tensor: torch.Tensor) -> None:
    target, source = copy.leaf.values(copy.box), tensor
    for dim, (first, size) in enumerate(zip(copy.first, copy.sizes, strict=True)):
        target = target.narrow(dim, first - copy.box.offsets[dim], size)
        source = source.narrow(dim, first - copy.chunk.offsets[dim], size)
    target.copy_(source)


def whole_tensor(stored: Stored, name: str) -> Wanted:
    """A tensor of its own for all of a stored one, on the CPU."""
    found = stored.tensors[name]
    made = torch.zeros(found.shape, dtype=found.dtype)
    return Wanted(name, Leaf(found.shape, made, (Box((0,) * len(found.shape), tuple(found.shape), 0),), (0,)))
