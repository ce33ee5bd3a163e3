"""Where a model's computation is split over ranks and comes together again: four functions and their gradients.

===============  =======================================  =======================
into a region    ``copy_to``: as it is                    backward: sum over ranks
out of it        ``reduce_from``: sum over ranks          backward: as it is
into a region    ``scatter_to``: the rank's own part      backward: concatenated
out of it        ``gather_from``: concatenated            backward: the rank's own part
===============  =======================================  =======================

Each one's gradient is another one of them, so that gradients of gradients are right as well.

[Note: in place] A sum is computed in the memory of its operand where nobody else can see that: a layer that passes
what it has just computed says ``in_place``. Everywhere else the operand is copied: a gradient, for one, may be shared
with another branch of the graph.
"""

from __future__ import annotations

import torch

from ..backend import ReduceOp
from ..torch_seams.compiling import not_compiled
from ..types import Context
from .groups import get_model_parallel_world_size, group_of
from .partition import split_tensor_along_last_dim


# ------------------------------------------------------------------------------------------ without gradients
def sum_over_ranks(
    tensor: torch.Tensor, *, in_place: bool = False, op: ReduceOp = ReduceOp.SUM
) -> torch.Tensor:
    """[any shape] -> the same shape; with one rank the tensor itself."""
    group = group_of(tensor)
    if group.world_size == 1:
        return tensor
    if not in_place or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(tensor, op=op, label="model parallel")
    return tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n / W], contiguous; with one rank the tensor itself."""
    group = group_of(tensor)
    if group.world_size == 1:
        return tensor
    # a copy also where the part would be contiguous: the whole must not stay in memory for it
    part = split_tensor_along_last_dim(tensor, group.world_size)[group.rank]
    return part.clone(memory_format=torch.contiguous_format)


def all_parts(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n * W], contiguous; with one rank the tensor itself."""
    group = group_of(tensor)
    if group.world_size == 1:
        return tensor
    parts = tensor.new_empty(group.world_size, *tensor.shape)
    group.all_gather_into(parts.view(-1), tensor.contiguous().view(-1), label="model parallel")
    return torch.cat(parts.unbind(), dim=-1)


# ------------------------------------------------------------------------------------------ with gradients
class _OfCopy(Context):
    in_place: bool


class CopyToRegion(torch.autograd.Function):
    """``apply(tensor, in_place)``; in_place: its gradient belongs to nobody else."""

    @staticmethod
    def forward(ctx: _OfCopy, input_: torch.Tensor, in_place: bool = False) -> torch.Tensor:  # type: ignore[override]
        ctx.in_place = in_place
        return input_

    @staticmethod
    def backward(ctx: _OfCopy, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ReduceFromRegion.apply(grad_output, ctx.in_place and not torch.is_grad_enabled()), None


class ReduceFromRegion(torch.autograd.Function):
    """``apply(tensor, in_place)``; in_place: the tensor was made for this and is a whole tensor of its own."""

    @staticmethod
    def forward(ctx: Context, input_: torch.Tensor, in_place: bool = False) -> torch.Tensor:  # type: ignore[override]
        output = sum_over_ranks(input_, in_place=in_place)
        if output is input_ and in_place:
            ctx.mark_dirty(input_)
        return output

    @staticmethod
    def backward(ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return CopyToRegion.apply(grad_output), None


class ScatterToRegion(torch.autograd.Function):
    """``apply(tensor)``"""

    @staticmethod
    def forward(ctx: Context, input_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return own_part(input_)

    @staticmethod
    def backward(ctx: Context, grad_output: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return GatherFromRegion.apply(grad_output)


class GatherFromRegion(torch.autograd.Function):
    """``apply(tensor)``"""

    @staticmethod
    def forward(ctx: Context, input_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return all_parts(input_)

    @staticmethod
    def backward(ctx: Context, grad_output: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return ScatterToRegion.apply(grad_output)


@not_compiled
def copy_to_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """The tensor, the same on all ranks; its gradient is the sum over them."""
    return CopyToRegion.apply(input_)


@not_compiled
def reduce_from_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks; the argument is left alone."""
    return ReduceFromRegion.apply(input_)


@not_compiled
def scatter_to_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n / W]: this rank's part of a tensor that is the same on all ranks.

    Raises:
        PartitionError: W does not divide the last dimension.
    """
    return ScatterToRegion.apply(input_)


@not_compiled
def gather_from_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n * W]: all ranks' parts."""
    return GatherFromRegion.apply(input_)


@not_compiled
def copy_into_layer(input_: torch.Tensor) -> torch.Tensor:
    """As :func:`copy_to_model_parallel_region`, for a layer that uses the result once, where its gradient is new."""
    return CopyToRegion.apply(input_, True)


@not_compiled
def reduce_in_layer(output: torch.Tensor) -> torch.Tensor:
    """As :func:`reduce_from_model_parallel_region`, in the memory of what the layer has just computed."""
    if get_model_parallel_world_size() == 1:
        return output
    return ReduceFromRegion.apply(output, not output._is_view())  # autograd wants views left alone
