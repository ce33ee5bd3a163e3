"""Cross entropy of logits that are split over ranks along the vocabulary; no rank ever has all of them."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ..backend import ReduceOp
from ..errors import ConfigurationError
from ..torch_seams.compiling import not_compiled
from ..types import Context
from .groups import get_model_parallel_rank, get_model_parallel_world_size
from .partition import VocabUtility
from .regions import sum_over_ranks


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
    """The loss of each token, the same on all ranks.

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
