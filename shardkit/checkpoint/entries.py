"""All that a checkpoint consists of, by path, and what of it each rank writes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigurationError
from ..fsdp.pieces import Box, Pieces
from ..torch_seams.dtensors import is_dtensor
from .format.records import refuse_what_is_no_data
from .leaves import Fixed, Leaf, Ranks, of_dtensor, of_pieces, refuse_class, whole

Path = tuple["str | int", ...]
LARGEST = 64 * 2**20  # bytes of a record: readers need that much memory, and ranks share what all have


class Entry(NamedTuple):
    """Something under a name in the state dict.

    Attributes:
        path: keys of the nested dicts and lists.
        value: as this rank has it.
    """

    path: Path
    value: Leaf | Fixed

    @property
    def name(self) -> str:
        """As DCP has it."""
        return ".".join(map(str, self.path))


class Part(NamedTuple):
    """What is stored as one record.

    Attributes:
        entry: which it is of.
        box: the part of a tensor; None for an object.
        data: the record of an object.
    """

    entry: Entry
    box: Box | None
    data: bytes = b""


# ------------------------------------------------------------ what there is
def of_extra(path: Path, value: object, ranks: Ranks) -> Iterator[Entry]:
    """A user's own: dicts of tensors by name are stored tensor by tensor, all else as one record."""
    if isinstance(value, Pieces):
        yield Entry(path, of_pieces(value, ranks))
    elif is_dtensor(value):
        yield Entry(path, of_dtensor(".".join(map(str, path)), value, ranks))
    elif isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            refuse_class(".".join(map(str, path)), value)
        yield Entry(path, whole(value, (0,)))
    elif isinstance(value, Mapping) and _is_state_dict(value):
        for key, inner in value.items():
            yield from of_extra((*path, key), inner, ranks)
    else:
        yield Entry(path, Fixed(value))


def _is_state_dict(value: object) -> bool:
    """Whether taking a dict apart and putting it together again gives the same."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(k, str) for k in value):
        return False
    return all(isinstance(v, torch.Tensor) or _is_state_dict(v) for v in value.values())


def check_names(entries: Iterable[Entry]) -> None:
    """Raises ConfigurationError where two entries have one name."""
    seen: dict[str, Path] = {}
    for entry in entries:
        before = seen.setdefault(entry.name, entry.path)
        if before != entry.path:
            raise ConfigurationError(
                f"{before} and {entry.path} are both called {entry.name!r} in a checkpoint"
            )


# ------------------------------------------------------------ who writes what
def parts_of_rank(entries: Iterable[Entry], rank: int) -> list[Part]:
    """What this rank writes; see [Note: copies]. Objects become bytes here.

    Raises:
        ConfigurationError: an object is more than data.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    mine: list[Part] = []
    for entry in entries:
        copies = entry.value.copies
        if rank not in copies:
            continue
        load = loads.setdefault(copies, [0] * len(copies))
        for part, size in _parts_of(entry):
            turn = load.index(min(load))
            load[turn] += size + 1024  # what a record has beside its values
            if copies[turn] == rank:
                mine.append(part if part.box is not None else part._replace(data=_record_of(entry)))
    return mine


def _parts_of(entry: Entry) -> Iterator[tuple[Part, int]]:
    if isinstance(entry.value, Fixed):
        yield Part(entry, None), 1024
        return
    itemsize = entry.value.base.element_size()
    for box in entry.value.boxes:
        for small in cut(box, max(1, LARGEST // itemsize)):
            yield Part(entry, small), math.prod(small.sizes) * itemsize


def cut(box: Box, largest: int) -> Iterator[Box]:
    """A box in order of its elements, in boxes of at most so many elements."""
    if math.prod(box.sizes) <= largest:
        yield box
        return
    dim = next(k for k, size in enumerate(box.sizes) if size > 1)
    row = math.prod(box.sizes[dim + 1 :])
    rows = max(1, largest // row)
    for first in range(0, box.sizes[dim], rows):
        count = min(rows, box.sizes[dim] - first)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + first, count
        yield from cut(Box(tuple(offsets), tuple(sizes), box.start + first * row), largest)


def _record_of(entry: Entry) -> bytes:
    value = entry.value.value if isinstance(entry.value, Fixed) else None
    made = io.BytesIO()
    try:
        torch.save(value, made)
    except Exception as error:  # a pickle fails with whatever an object raises
        raise ConfigurationError(
            f"{entry.name!r} can't be saved ({type(error).__name__}: {error}): checkpoints hold data, that is tensors, "
            "numbers, strings and containers of them"
        ) from error
    data = made.getvalue()
    refuse_what_is_no_data(entry.name, data)
    return data
