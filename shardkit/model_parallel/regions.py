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

Cross entropy of logits that are split over ranks along the vocabulary is computed so that no rank ever has all of them.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ..backend import ReduceOp
from ..errors import ConfigurationError
from ..torch_seams.compiling import not_compiled
from ..types import Context
from .groups import (
    VocabUtility,
    get_model_parallel_rank,
    get_model_parallel_world_size,
    group_of,
    split_tensor_along_last_dim,
)


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
    """Returns the tensor, the same on all ranks; its gradient is the sum over them."""
    return CopyToRegion.apply(input_)


@not_compiled
def reduce_from_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all ranks; the argument is left alone."""
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
    """Copies as :func:`copy_to_model_parallel_region`, for a layer that uses the result once: its gradient is new."""
    return CopyToRegion.apply(input_, True)


@not_compiled
def reduce_in_layer(output: torch.Tensor) -> torch.Tensor:
    """Reduces as :func:`reduce_from_model_parallel_region` does, in the memory of what the layer has just computed."""
    if get_model_parallel_world_size() == 1:
        return output
    return ReduceFromRegion.apply(output, not output._is_view())  # autograd wants views left alone


class VocabParallelCrossEntropy(torch.autograd.Function):
    """``apply(logits [..., V / W], target [...]) -> loss [...]``"""

    @staticmethod
    def forward(ctx: Context, vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        largest = sum_over_ranks(vocab_parallel_logits.amax(dim=-1), in_place=True, op=ReduceOp.MAX)
        logits = vocab_parallel_logits - largest.unsqueeze(-1)
        size = logits.size(-1)
        first, last = VocabUtility.vocab_range_from_per_partition_vocab_size(
            size, get_model_parallel_rank(), get_model_parallel_world_size()
        )
        elsewhere = (target < first) | (target >= last)
        index = (target - first).masked_fill_(elsewhere, 0)
        wanted = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0)
        wanted = sum_over_ranks(wanted, in_place=True)
        softmax = logits.exp_()
        total = sum_over_ranks(softmax.sum(dim=-1), in_place=True)
        loss = total.log() - wanted
        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), elsewhere, index)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        softmax, elsewhere, index = ctx.saved_tensors
        # The largest tensor of many a model: its memory becomes the gradient's, unless backward may come again.
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        grad = softmax.clone() if again else softmax
        rows = grad.view(-1, grad.size(-1))
        rows[torch.arange(len(rows), device=rows.device), index.view(-1)] -= (
            (~elsewhere).view(-1).to(rows.dtype)
        )
        return grad.mul_(grad_output.unsqueeze(-1)), None


@not_compiled
def vocab_parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the loss of each token, the same on all ranks.

    Targets outside of the vocabulary are not looked for (that would make a device wait): their loss is meaningless
    and to be masked by the caller.

    Args:
        vocab_parallel_logits: [..., V / W], this rank's part; left alone.
        target: [...], int64, indices of the whole vocabulary, the same on all ranks.

    Returns:
        [...], dtype of the logits.

    Raises:
        ConfigurationError: the shapes don't fit.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ConfigurationError(
            f"logits have shape {tuple(vocab_parallel_logits.shape)} and targets {tuple(target.shape)}; targets have "
            "one index for each row of logits: the same shape without the last dimension"
        )
    return VocabParallelCrossEntropy.apply(vocab_parallel_logits, target)
