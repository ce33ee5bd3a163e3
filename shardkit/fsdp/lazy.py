"""What forward and backward do besides where execution is lazy: a compiler decides when values exist.

[Note: where gathered values end] A unit is gathered in forward and again in backward so that its parameters need no
memory in between. A compiler undoes that if it can. It sees one program for the whole step, in which

1. both gathers have the same input: it may compute one of them and keep it, or gather everything at the start;
2. autograd may have saved views of the first one. ``weight.t()`` of a linear layer is a tensor of its own, so that
   backward would use what forward gathered, and nobody the second gather.

Against the first, a gather is tied (``Backend.tie``) to what it has to wait for: the inputs of the unit that computes
meanwhile, in backward the gradients of its outputs and the last reduced gradients. Against the second, what is saved
is which original parameter it is a view of, and backward takes the same view of the original parameter's value then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..torch_seams.compiling import not_compiled
from ..types import Tree
from .originals import GatheredParameter


class SavedView(NamedTuple):
    """An original parameter, and how it is seen."""

    param: torch.Tensor
    view: torch.Tensor | None  # None: as it is, or transposed
    transposed: bool = False


def _is_transposed(view: torch.Tensor, base: torch.Tensor) -> bool:
    node = view.grad_fn
    return node is not None and node.name() == "TBackward0" and _variable(node.next_functions[0][0]) is base


def _variable(node: Tree) -> object:
    try:
        return node.variable
    except AttributeError:
        return None


@not_compiled
def _pack(tensor: torch.Tensor) -> torch.Tensor | SavedView:
    base = tensor._base
    if base is None:
        return SavedView(tensor, None) if type(tensor) is GatheredParameter else tensor
    if type(base) is not GatheredParameter:
        return tensor
    if _is_transposed(tensor, base):
        return SavedView(base, None, True)
    return SavedView(base, tensor)


@not_compiled
def _unpack(saved: torch.Tensor | SavedView) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    value = saved.param.data
    if saved.view is not None:
        return saved.view._view_func_unsafe(value)  # type: ignore[attr-defined, no-any-return]
    return value.t() if saved.transposed else value


@not_compiled
def saving_originals_by_name() -> AbstractContextManager[object]:
    """Inside, what autograd saves of original parameters is taken anew in backward; see the note above.

    Somebody else's hooks for saved tensors (activation checkpointing, offloading, an outer unit's) win.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)
