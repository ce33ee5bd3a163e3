"""What surrounds a call of a wrapped module: its inputs, what may leave it, and calls that have no meaning."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_map_only

from ..errors import LifecycleError
from ..torch_seams.compiling import callees_compiled, not_compiled
from ..torch_seams.hooks import tensors_of, watch_outputs
from ..types import AnyCallable, Args, Kwargs, Tree
from .flat_param import FlatParam
from .refusals import backward_when_summoned

if TYPE_CHECKING:
    from .unit import Unit


@not_compiled
def cast_inputs(inputs: Tree, dtype: torch.dtype) -> Tree:
    """The same with floating point tensors in this dtype."""
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, inputs
    )


@callees_compiled
def run_summoned(module: AnyCallable, flats: Sequence[FlatParam], args: Args, kwargs: Kwargs) -> Tree:
    """A forward inside of ``summon_full_params``: this rank's alone, in the dtypes of any other forward."""
    with computing_when_summoned(flats):
        outputs = module(*args, **kwargs)
    refuse_backward(flats, outputs)
    return outputs


def computing_when_summoned(flats: Sequence[FlatParam]) -> ExitStack:
    """Inside, parameters that are summoned have the dtype that forward computes with."""
    with ExitStack() as stack:
        for flat in flats:
            if flat.is_summoned:
                stack.enter_context(flat.summoned_for_compute())
        return stack.pop_all()


def refuse_backward(flats: Sequence[FlatParam], outputs: object) -> None:
    """Backward through what was computed when summoned raises."""
    if flats and torch.is_grad_enabled():
        watch_outputs(tensors_of(outputs), _Refused(flats[0]).enter_backward)


class _Refused:
    """Backward can't go through a forward that was run when summoned."""

    def __init__(self, flat: FlatParam) -> None:
        self._flat = flat

    def enter_backward(self, gradient: torch.Tensor | None = None) -> None:
        raise backward_when_summoned(self._flat)


@not_compiled
def lends_memory(unit: Unit, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these is a view of an original parameter (or one itself), so that its memory is about to go."""
    for tensor in tensors:
        for flat in unit.needs:
            memory = flat.store.memory
            if memory and torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == memory:
                return True
    return False


@not_compiled
def without_lent_memory(unit: Unit, outputs: Tree) -> Tree:
    """The outputs with copies in place of original parameters and their views.

    Raises:
        LifecycleError: they are in an object whose content can't be replaced.
    """

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if lends_memory(unit, (tensor,)) else tensor

    copied = tree_map_only(torch.Tensor, owned, outputs)
    if lends_memory(unit, tensors_of(copied)):
        raise LifecycleError(
            f"rank {unit.needs[0].group.rank}: the forward of FSDP unit {unit.name or 'the root'!r} returns a "
            f"parameter, or a view of one, inside a {type(outputs).__name__}; its memory ends with forward. "
            "Return a clone() of it"
        )
    return copied
