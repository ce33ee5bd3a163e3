"""Values of any nesting as a list of their tensors and what is left without them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map


class _Slot:
    """Stands for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Packed(NamedTuple):
    """Stands for a PackedSequence, which is a tuple that can't hold slots."""

    data: Any
    batch_sizes: Any
    sorted_indices: Any
    unsorted_indices: Any


def take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with slots in place of tensors, which go into the list; within containers and dataclasses."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return _Slot(len(tensors) - 1)
        if isinstance(leaf, PackedSequence):
            return _Packed(*(take_tensors(part, tensors) for part in leaf))
        return _in_fields(lambda field: take_tensors(field, tensors), leaf)

    return tree_map(take, value, is_leaf=lambda x: isinstance(x, PackedSequence))


def put_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The reverse of :func:`take_tensors`."""

    def put(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return tensors[leaf.index]
        if isinstance(leaf, _Packed):
            return PackedSequence(*(put_tensors(part, tensors) for part in leaf))
        return _in_fields(lambda field: put_tensors(field, tensors), leaf)

    return tree_map(put, value, is_leaf=lambda x: isinstance(x, _Packed))


def _in_fields(function: Callable[[Any], Any], leaf: Any) -> Any:
    """A dataclass with the function applied to its fields; other objects as they are."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    made = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(made, field.name, function(getattr(leaf, field.name)))
    return made
