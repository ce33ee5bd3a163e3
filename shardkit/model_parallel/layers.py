"""Linear layers and embeddings of which every rank holds a part.

Sizes: W ranks of the model-parallel group. All ranks draw the whole start value and keep their part, so that from the
same seed a layer starts with the same numbers at every W (stride 1). ``init_method`` is called with that tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import init

from ..backend import ReduceOp
from ..errors import ConfigurationError
from ..torch_seams.compiling import not_compiled
from .groups import (
    VocabUtility,
    divide_and_check_no_remainder,
    get_model_parallel_rank,
    get_model_parallel_world_size,
)
from .regions import (
    all_parts,
    copy_into_layer,
    gather_from_model_parallel_region,
    reduce_in_layer,
    scatter_to_model_parallel_region,
    sum_over_ranks,
)

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
        out_features: of the whole.
        in_features: of the whole.
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


class VocabParallelEmbedding(nn.Module):
    """An embedding whose ranks hold the rows of V / W tokens; indices [...] -> [..., embedding_dim] on all ranks.

    Indices outside of the vocabulary give zeros.

    Args:
        num_embeddings: V, of the whole.
        embedding_dim: size of a row.
        padding_idx: this token's row gets no gradient (its start value is drawn like all others).
        max_norm: rows that are looked up are scaled down to this norm.
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
        self.padding_idx = check_padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, get_model_parallel_rank(), get_model_parallel_world_size()
        )
        rows = self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim))
        initialize_affine_weight(self.weight, num_embeddings, embedding_dim, rows, 0, init_method)

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


class ParallelEmbedding(nn.Module):
    """An embedding whose ranks hold embedding_dim / W columns; indices [...] -> [..., embedding_dim] on all ranks.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size of a row, of the whole.
        padding_idx: this token's row gets no gradient (its start value is drawn like all others).
        max_norm: rows that are looked up are scaled down to this norm (of the whole row).
        norm_type: of that norm.
        scale_grad_by_freq: gradients are divided by how often a token was looked up.
        sparse: the weight's gradient is sparse.
        init_method: called with the whole weight.
        keep_master_weight_for_test: ignored, as in fairscale.

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
        self.padding_idx = check_padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        columns = divide_and_check_no_remainder(embedding_dim, get_model_parallel_world_size())
        self.embedding_dim_per_partition = columns
        self.weight = nn.Parameter(torch.empty(num_embeddings, columns))
        initialize_affine_weight(self.weight, num_embeddings, embedding_dim, columns, 1, init_method)

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


def check_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Returns the index, counted from the front.

    Raises:
        ConfigurationError: it is outside of the vocabulary.
    """
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(
            f"padding_idx is {padding_idx}, but the vocabulary has {num_embeddings} entries; pass one of them or None"
        )
    return padding_idx % num_embeddings


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
        in_features: size of x.
        out_features: size of y, of the whole.
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
        """The whole weight [out_features, in_features] of now (collective), in the order of the gathered outputs."""
        return all_parts(self.weight.data.t()).t()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        output = F.linear(copy_into_layer(input_), self.weight, self.bias)
        return gather_from_model_parallel_region(output) if self.gather_output else output


class RowParallelLinear(_SplitLinear):
    """``y = x A^T + b`` whose ranks read in_features / W of the inputs each; y is the sum of what they compute.

    x [..., in_features], the same on all ranks, or each rank's [..., in_features / W] with ``input_is_parallel`` ->
    y [..., out_features] on all ranks. Parameters: weight [out_features, in_features / W], bias [out_features], zero
    at the start and whole on every rank.

    Args:
        in_features: size of x, of the whole.
        out_features: size of y.
        bias: whether there is one.
        input_is_parallel: each rank passes its own part of x.
        init_method: called with the whole weight.
        stride: see :func:`initialize_affine_weight`.
        keep_master_weight_for_test: ``master_weight`` is the whole weight as it was at the start, else None.

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
