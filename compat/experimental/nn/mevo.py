"""fairscale.experimental.nn.mevo: projection, softmax and loss of a large vocabulary in little memory.

The computation is :func:`shardkit.model_parallel.layers.linear_cross_entropy`. Gradients of the weight go through
autograd, where fairscale's code writes to ``weight.grad`` itself; hooks (of FSDP, of data parallel wrappers) see them.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.model_parallel.layers import Margin, linear_cross_entropy
from shardkit.types import Context

DEBUG = False  # fairscale's; nothing is printed here


def get_data(
    shape: tuple[tuple[int, int], tuple[int, int]],
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes random input [tokens, D], weight [words, D] and targets [tokens] of shape ((tokens, D), (D, words))."""
    (tokens, width), (same_width, words) = shape
    if width != same_width:
        raise ConfigurationError(f"shapes {shape[0]} and {shape[1]} can't be multiplied")
    input = torch.rand(tokens, width, device=device, dtype=dtype).requires_grad_(True)
    weight = nn.Linear(width, words, bias=False, device=device, dtype=dtype).weight
    return input, weight, torch.randint(words, (tokens,), device=device)


T = TypeVar("T")


def _rows(input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [..., D] and [...] as [T, D] and [T]."""
    return input.reshape(-1, input.shape[-1]), target.reshape(-1)


def _tile(n: int, factor: int) -> int:
    """Returns the power of two next above n / factor, at most n: fairscale's size of tiles."""
    return min(1 << max(n // max(factor, 1) - 1, 0).bit_length(), max(n, 1))


def lmcl_matmul(
    i: torch.Tensor, w: torch.Tensor, tgt: torch.Tensor, w_idx: int, margin: float, scale: float | None
) -> torch.Tensor:
    """[t, D], [v, D], [t] -> [t, v]: cosines less the margin at the targets, times the scale.

    Args:
        w_idx: which tile of the vocabulary ``w`` is; all before it have its size.
    """
    cosines = F.normalize(i, dim=1) @ F.normalize(w, dim=1).T
    own = torch.arange(len(w), device=w.device) + w_idx * len(w) == tgt.reshape(-1, 1)
    return (cosines - margin * own) * (1.0 if scale is None else scale)


class BaselineSoftmax(nn.Module):
    """The plain way: all logits, and a softmax in fp32.

    Args:
        proj_weight: [V, D].
        tile_factor: ignored; it is that of MemoryEfficientVocabOutput.
        log_softmax: log-probabilities, not probabilities.
        margin: of the large margin cosine loss.
        scale: of the large margin cosine loss; None: a plain loss.
    """

    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 0,
        log_softmax: bool = True,
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        words, width = proj_weight.shape
        self.fc = nn.Linear(width, words, bias=False, device="meta")
        self.fc.weight = proj_weight
        self.log_softmax = log_softmax
        self.margin = margin
        self.scale = scale

    def lmcl_pre_softmax(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns logits of the large margin cosine loss, [T, V]."""
        return lmcl_matmul(input, self.fc.weight, target, 0, self.margin, self.scale)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[..., D] and [...] -> [T, V] in fp32."""
        input, target = _rows(input, target)
        logits = self.fc(input) if self.scale is None else self.lmcl_pre_softmax(input, target)
        softmax = F.log_softmax if self.log_softmax else F.softmax
        return softmax(logits, dim=-1, dtype=torch.float32)


class BaselineSoftmaxNllLoss(BaselineSoftmax):
    """:class:`BaselineSoftmax` and the sum of the negative log-likelihoods."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[..., D] and [...] -> []."""
        return F.nll_loss(super().forward(input, target), target.reshape(-1), reduction="sum")


class BackwardTriggerFn(torch.autograd.Function):
    """``apply(weight, trigger)`` -> the weight; backward gives the trigger a gradient of zero as well."""

    @staticmethod
    def forward(ctx: Context, w: torch.Tensor, trigger_tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(trigger_tensor)
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Context, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return args[0], torch.zeros_like(ctx.saved_tensors[0])


class BackwardTrigger(nn.Module):
    """Hands out a parameter of another module; its own parameter gets a gradient (of zero) when that one does.

    Not needed any more, since the weight's own hooks see its gradient; state dicts hold it.
    """

    def __init__(self, linked_param: torch.Tensor) -> None:
        super().__init__()
        self.trigger = nn.Parameter(torch.rand(1, dtype=linked_param.dtype, device=linked_param.device))
        self.__dict__["_linked_param"] = linked_param  # not a parameter of this module

    def forward(self) -> torch.Tensor:
        return BackwardTriggerFn.apply(self._linked_param, self.trigger)


class MemoryEfficientVocabOutput(nn.Module):
    """Linear layer, softmax and negative log-likelihood, tile by tile; ``MEVO`` for short.

    Args:
        proj_weight: [V, D], usually the embedding's as well.
        tile_factor: into how many tiles tokens and vocabulary are cut (sizes are powers of two).
        reduction: "sum" or "mean" over all tokens.
        margin: of the large margin cosine loss.
        scale: of the large margin cosine loss; None: a plain loss.
    """

    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 16,
        reduction: str = "sum",
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("sum", "mean"):
            raise ConfigurationError(f'reduction is {reduction!r}; it is "sum" or "mean"')
        self.proj_weight = proj_weight
        self.tf_in, self.tf_w = tile_factor, tile_factor
        self.reduction = reduction
        self.margin = margin
        self.scale = scale
        self.log_softmax = True
        self.trigger = BackwardTrigger(proj_weight)

    def get_target_nlprob(
        self,
        i: torch.Tensor,
        w: torch.Tensor,
        target: torch.Tensor,
        debase_max: torch.Tensor,
        exp_sums: torch.Tensor,
    ) -> torch.Tensor:
        """Sums the targets' negative log-probabilities, given each token's maximum and sum of exponentials."""
        logits = (i * F.embedding(target, w)).float().sum(1)
        if self.scale is not None:
            cosines = F.cosine_similarity(i, F.embedding(target, w), dim=1).float()
            logits = (cosines - self.margin) * self.scale
        log_probabilities = logits - debase_max - exp_sums.log()
        return -(log_probabilities if self.log_softmax else log_probabilities.exp()).sum()

    def eval_forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns logits [..., V], without margin and scale."""
        return input @ self.proj_weight.T

    def forward(self, input: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """[..., D] and [...] -> the loss; in eval mode, without a target, the logits.

        Raises:
            ConfigurationError: there is no target, and the module is in training mode.
        """
        if target is None:
            if self.training:
                raise ConfigurationError("a loss needs targets; for logits call eval() first")
            return self.eval_forward(input)
        input, target = _rows(input, target)
        weight = BackwardTriggerFn.apply(self.proj_weight, self.trigger.trigger)
        return linear_cross_entropy(
            input,
            weight,
            target,
            tokens_per_tile=_tile(len(input), self.tf_in),
            words_per_tile=_tile(len(self.proj_weight), self.tf_w),
            reduction=self.reduction,
            margin=None if self.scale is None else Margin(self.margin, self.scale),
        )
