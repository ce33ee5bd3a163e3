"""Views of original parameters that modules keep beyond the forward that made them (``self.cache = w.t()``).

[Note: kept views] While a unit is gathered, a view of an original parameter is a tensor like any other. When the unit's
memory is given back, it is a tensor without memory: reading it would end the process, or show what lies there now. So
where a module of the unit keeps one, it changes its class with the original parameters (see [Note: released] of
``originals.py``), and back when they have their values again. To find it costs a step nothing: storage knows how many
tensors look at it. Where they are no more than the last time, and all were autograd's then, nothing is new; else the
attributes of the unit's modules are looked through.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from ..layout import ShardLayout
from ..torch_seams.hooks import NO_BACKWARD, current_backward
from ..types import Tree
from .originals import OriginalParameter, ReleasedParameter, ReleasedView, as_tensors, note_view

_holders_of = torch._C._storage_Use_Count  # how many tensors look at a storage
_address_of = torch._C._storage_address  # type: ignore[attr-defined]


class KeptViews:
    """The views of one flat parameter's original parameters that modules keep.

    Args:
        memory: identifies the storage that original parameters are views of.
        originals: in the order of ``layout``.

    Attributes:
        found: those that were; some may be gone.
    """

    def __init__(self, memory: int, originals: Sequence[OriginalParameter], layout: ShardLayout) -> None:
        self._memory = memory
        self._originals = originals
        self._layout = layout
        # How many tensors looked at the memory the last time none was kept; by whether gradients were enabled, and
        # whether a backward ran.
        self._familiar: dict[tuple[bool, bool], int] = {}
        self.found: list[tuple[TensorWeakRef, type[torch.Tensor]]] = []

    def conceal(self, modules: Sequence[nn.Module]) -> None:
        """The memory is about to be given back; views may be kept by these modules."""
        state = (torch.is_grad_enabled(), current_backward() != NO_BACKWARD)
        now = _holders_of(self._memory)
        if not self.found and now <= self._familiar.get(state, 0):
            self._familiar[state] = now
            return
        self._find(modules)
        if not self.found:
            self._familiar[state] = _holders_of(self._memory)
            return
        offsets, numbers = zip(
            *sorted((start, k) for k, start in enumerate(self._layout.offsets())), strict=True
        )
        with as_tensors():
            for ref, _ in self.found:
                tensor: Tree = ref()
                number = numbers[max(0, bisect.bisect_right(offsets, int(tensor.storage_offset())) - 1)]
                note_view(tensor, self._originals[number].param)
                is_param = isinstance(tensor, nn.Parameter)
                tensor.__class__ = ReleasedParameter if is_param else ReleasedView

    def _find(self, modules: Sequence[nn.Module]) -> None:
        found = {id(t): (ref, kind) for ref, kind in self.found if (t := ref()) is not None}
        own = {id(original.param) for original in self._originals}
        for module in modules:
            for tensor in _tensors_in(list(module.__dict__.values())):
                if id(tensor) in own or id(tensor) in found or not torch._C._has_storage(tensor):
                    continue
                if _address_of(tensor) == self._memory:
                    found[id(tensor)] = (TensorWeakRef(tensor), type(tensor))
        self.found = list(found.values())

    def reveal(self) -> None:
        """The memory is back."""
        for ref, kind in self.found:
            tensor = ref()
            if tensor is not None:
                tensor.__class__ = kind


def _tensors_in(values: Tree, depth: int = 4) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, sets and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | set) and depth:
            yield from _tensors_in(value, depth - 1)
        elif isinstance(value, dict) and depth:
            yield from _tensors_in(list(value.values()), depth - 1)
