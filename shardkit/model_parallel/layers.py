"""Linear layers, embeddings and cross entropy of which every rank holds a part, and the regions they are made of.

Sizes: W ranks of the model-parallel group. All ranks draw the whole start value and keep their part, so that from the
same seed a layer starts with the same numbers at every W (stride 1). ``init_method`` is called with that tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import init

from ..backend import ReduceOp, not_compiled
from ..errors import ConfigurationError
from ..types import Context
from .groups import (
    VocabUtility,
    divide_and_check_no_remainder,
    get_model_parallel_rank,
    get_model_parallel_world_size,
    group_of,
    split_tensor_along_last_dim,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "vocab_parallel_cross_entropy",
]


# ------------------------------------------------------------ regions
# Where a model's computation is split over ranks and comes together again: four functions and their gradients.
# ===============  =======================================  =======================
# into a region    ``copy_to``: as it is                    backward: sum over ranks
# out of it        ``reduce_from``: sum over ranks          backward: as it is
# into a region    ``scatter_to``: the rank's own part      backward: concatenated
# out of it        ``gather_from``: concatenated            backward: the rank's own part
# ===============  =======================================  =======================
#
# Each one's gradient is another one of them, so that gradients of gradients are right as well.
#
# [Note: in place] A sum is computed in the memory of its operand where nobody else can see that: a layer that passes
# what it has just computed says ``in_place``. Everywhere else the operand is copied: a gradient, for one, may be shared
# with another branch of the graph.
#
# Cross entropy of logits that are split over ranks along the vocabulary is computed so that no rank ever has all of
# them.
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


# ------------------------------------------------------------ layers
InitMethod = Callable[[torch.Tensor], torch.Tensor]


def initialize_affine_weight(
    weight: torch.Tensor,
    out_features: int,
    in_features: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
) -> torch.Tensor | None:
    """Fills a rank's part of a weight [out_features, in_features] that is split along ``partition_dim``.

    Args:
        weight: written.
        out_features, in_features: of the whole.
        per_partition_size: of the part, along ``partition_dim``.
        partition_dim: 0 or 1.
        init_method: called with the whole weight.
        stride: the part is this many pieces, one of each of as many sections of the whole (a layer that computes
            queries, keys and values at once has three).
        return_master_weight: keep the whole.

    Returns:
        The whole weight, or None. With one rank that is ``weight`` itself.

    Raises:
        PartitionError: ``stride`` does not divide the part.
    """
    world_size = get_model_parallel_world_size()
    if world_size == 1:
        init_method(weight)
        return weight if return_master_weight else None
    whole = torch.empty(out_features, in_features, dtype=weight.dtype, device=weight.device)
    init_method(whole)
    pieces = torch.split(whole, divide_and_check_no_remainder(per_partition_size, stride), dim=partition_dim)
    with torch.no_grad():
        weight.copy_(torch.cat(pieces[get_model_parallel_rank() :: world_size], dim=partition_dim))
    return whole if return_master_weight else None


class _SplitEmbedding(nn.Module):
    """A weight [num_embeddings, embedding_dim] of which each rank has a part, along dimension ``dim``."""

    num_embeddings: int
    embedding_dim: int

    def _fill(self, dim: int, padding_idx: int | None, init_method: InitMethod) -> int:
        """Makes the parameter; returns the size of a part."""
        sizes = [self.num_embeddings, self.embedding_dim]
        self.padding_idx = padding_idx
        if padding_idx is not None:
            if not -sizes[0] <= padding_idx < sizes[0]:
                raise ConfigurationError(
                    f"padding_idx is {padding_idx}, but the vocabulary has {sizes[0]} entries; pass one of them or None"
                )
            self.padding_idx = padding_idx % sizes[0]  # counted from the front
        part = sizes[dim] = divide_and_check_no_remainder(sizes[dim], get_model_parallel_world_size())
        self.weight = nn.Parameter(torch.empty(*sizes))
        initialize_affine_weight(self.weight, self.num_embeddings, self.embedding_dim, part, dim, init_method)
        return part


class VocabParallelEmbedding(_SplitEmbedding):
    """An embedding whose ranks hold the rows of V / W tokens; indices [...] -> [..., embedding_dim] on all ranks.

    Indices outside of the vocabulary give zeros.

    Args:
        num_embeddings: V, of the whole.
        embedding_dim: size of a row, of the whole.
        padding_idx: this token's row gets no gradient (its start value is drawn like all others).
        max_norm: rows that are looked up are scaled down to this norm (of the whole row).
        norm_type: of that norm.
        scale_grad_by_freq: gradients are divided by how often a token was looked up.
        sparse: the weight's gradient is sparse.
        init_method: called with the whole weight.

    Raises:
        PartitionError: W does not divide V.
        ConfigurationError: ``padding_idx`` is outside of the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        rows = self.num_embeddings_per_partition = self._fill(0, padding_idx, init_method)
        self.vocab_start_index = rows * get_model_parallel_rank()
        self.vocab_end_index = self.vocab_start_index + rows

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        if self.max_norm is None and not self.scale_grad_by_freq and not self.sparse:
            index = (input_ - self.vocab_start_index).masked_fill_(elsewhere, 0)
            output = self._look_up(index).masked_fill_(elsewhere.unsqueeze(-1), 0)
        else:  # which tokens are looked up, and how often, matters: only those that are here
            here = ~elsewhere
            rows = self._look_up(input_[here] - self.vocab_start_index)
            output = rows.new_zeros(*input_.shape, self.embedding_dim).index_put((here,), rows)
        return reduce_in_layer(output)

    def _look_up(self, index: torch.Tensor) -> torch.Tensor:
        padding = self.padding_idx
        if padding is not None:
            here = self.vocab_start_index <= padding < self.vocab_end_index
            padding = padding - self.vocab_start_index if here else None
        return F.embedding(
            index, self.weight, padding, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class ParallelEmbedding(_SplitEmbedding):
    """An embedding whose ranks hold embedding_dim / W columns; indices [...] -> [..., embedding_dim] on all ranks.

    Arguments are those of :class:`VocabParallelEmbedding`; ``keep_master_weight_for_test`` is ignored, as in fairscale.

    Raises:
        PartitionError: W does not divide ``embedding_dim``.
        ConfigurationError: ``padding_idx`` is outside of the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.embedding_dim_per_partition = self._fill(1, padding_idx, init_method)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.max_norm is not None:
            self._limit_norms(input_, self.max_norm)
        output = F.embedding(
            input_, self.weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse
        )
        return gather_from_model_parallel_region(output)

    @not_compiled
    def _limit_norms(self, input_: torch.Tensor, max_norm: float) -> None:
        """Scales rows down as torch's ``max_norm`` does, where every rank has a part of each."""
        index = input_.unique()
        with torch.no_grad():
            rows = self.weight[index]
            if self.norm_type == float("inf"):
                norms = sum_over_ranks(rows.abs().amax(dim=1), in_place=True, op=ReduceOp.MAX)
            else:
                norms = sum_over_ranks(rows.abs().pow(self.norm_type).sum(dim=1), in_place=True)
                norms = norms.pow(1 / self.norm_type)
            scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
            self.weight[index] = rows * scale.unsqueeze(1)


class _SplitLinear(nn.Module):
    """A weight [out_features, in_features] of which each rank has a part, along dimension ``dim``, and a bias."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def _fill(self, dim: int, bias: bool, init_method: InitMethod, stride: int, keep_master: bool) -> int:
        """Makes the parameters; returns the size of a part."""
        sizes = [self.out_features, self.in_features]
        part = sizes[dim] = divide_and_check_no_remainder(sizes[dim], get_model_parallel_world_size())
        self.weight = nn.Parameter(torch.empty(*sizes))
        self.register_parameter("bias", nn.Parameter(torch.zeros(sizes[0])) if bias else None)
        whole = initialize_affine_weight(
            self.weight, self.out_features, self.in_features, part, dim, init_method, stride, keep_master
        )
        # detached: a parameter would become an entry of the state dict
        self.master_weight = None if whole is None else whole.detach()
        return part


class ColumnParallelLinear(_SplitLinear):
    """``y = x A^T + b`` whose ranks compute out_features / W of the outputs each.

    x [..., in_features], the same on all ranks -> y [..., out_features], or [..., out_features / W] without
    ``gather_output``. Parameters: weight [out_features / W, in_features], bias [out_features / W], zero at the start.

    Args:
        in_features, out_features: sizes of x and y, of the whole.
        bias: whether there is one.
        gather_output: all ranks get all outputs.
        init_method: called with the whole weight.
        stride: see :func:`initialize_affine_weight`.
        keep_master_weight_for_test: ``master_weight`` is the whole weight as it was at the start, else None.

    Raises:
        PartitionError: W does not divide ``out_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.output_size_per_partition = self._fill(0, bias, init_method, stride, keep_master_weight_for_test)

    def get_master_weight(self) -> torch.Tensor:
        """Returns the whole weight [out_features, in_features] of now (collective), in the gathered outputs' order."""
        return all_parts(self.weight.data.t()).t()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        output = F.linear(copy_into_layer(input_), self.weight, self.bias)
        return gather_from_model_parallel_region(output) if self.gather_output else output


class RowParallelLinear(_SplitLinear):
    """``y = x A^T + b`` whose ranks read in_features / W of the inputs each; y is the sum of what they compute.

    x [..., in_features], the same on all ranks, or each rank's [..., in_features / W] with ``input_is_parallel`` ->
    y [..., out_features] on all ranks. Parameters: weight [out_features, in_features / W], bias [out_features], zero
    at the start and whole on every rank. Arguments are those of :class:`ColumnParallelLinear`, but:

    Args:
        input_is_parallel: each rank passes its own part of x.

    Raises:
        PartitionError: W does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = self._fill(1, bias, init_method, stride, keep_master_weight_for_test)

    def get_master_weight(self) -> torch.Tensor:
        """Returns the whole weight [out_features, in_features] of now (collective), in the order of the whole input."""
        return all_parts(self.weight.data)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        part = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        output = reduce_in_layer(F.linear(part, self.weight))
        return output if self.bias is None else output + self.bias
