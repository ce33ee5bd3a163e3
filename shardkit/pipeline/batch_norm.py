"""Batch norms whose running statistics are those of mini-batches, where forward sees micro-batches.

[Note: deferred statistics] Values are normalized with the statistics of their micro-batch. The running statistics are
updated once a mini-batch, from sums over all its micro-batches, which the buffers ``sum`` and ``sum_squares`` collect.
As torch's they take the unbiased variance (fairscale's take the biased one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..wrapping.activations import is_recomputing

TModule = TypeVar("TModule", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that waits for ``chunks`` micro-batches before it updates its running statistics.

    Args:
        num_features: channels, the second dimension of inputs [batch, channels, ...].
        eps, momentum, affine: as of torch's batch norms.
        chunks: micro-batches in a mini-batch.
    """

    sum: torch.Tensor
    sum_squares: torch.Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        mean = cast(torch.Tensor, self.running_mean)
        self.register_buffer("sum", torch.zeros_like(mean))
        self.register_buffer("sum_squares", torch.zeros_like(mean))
        self.counter = 0  # values of a channel in the sums
        self.tracked = 0  # micro-batches in the sums
        self.chunks = chunks

    @torch.no_grad()
    def _track(self, input: torch.Tensor) -> None:
        over = [d for d in range(input.dim()) if d != 1]
        values = input.to(self.sum.dtype)
        self.sum += values.sum(over)
        self.sum_squares += values.square().sum(over)
        self.counter += input.numel() // input.size(1)
        self.tracked += 1

    @torch.no_grad()
    def _commit(self) -> None:
        batches = cast(torch.Tensor, self.num_batches_tracked).add_(1)
        weight = 1.0 / float(batches) if self.momentum is None else self.momentum
        mean = self.sum / self.counter
        variance = (self.sum_squares / self.counter - mean.square()) * (
            self.counter / max(self.counter - 1, 1)
        )
        cast(torch.Tensor, self.running_mean).lerp_(mean, weight)
        cast(torch.Tensor, self.running_var).lerp_(variance, weight)
        self.sum.zero_()
        self.sum_squares.zero_()
        self.counter = self.tracked = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes [batch, channels, ...]; see [Note: deferred statistics]."""
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if not is_recomputing():
            self._track(input)
            if self.tracked >= self.chunks:
                self._commit()
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    @classmethod
    def convert_deferred_batch_norm(cls, module: TModule, chunks: int = 1) -> TModule:
        """Replaces all batch norms within a module that track running statistics; keeps their tensors.

        Returns:
            The module, or what takes its place if it is a batch norm itself.
        """

        def make(old: _BatchNorm) -> _BatchNorm:
            if not old.track_running_stats or (isinstance(old, DeferredBatchNorm) and old.chunks == chunks):
                return old
            made = cls(old.num_features, old.eps, old.momentum, old.affine, chunks)
            mean = cast(torch.Tensor, old.running_mean)
            return made.to(mean.device, mean.dtype)

        return cast(TModule, replace_batch_norms(module, make))


def replace_batch_norms(module: nn.Module, make: Callable[[_BatchNorm], _BatchNorm]) -> nn.Module:
    """Puts what ``make`` returns in the place of each batch norm within a module, with its tensors.

    Returns:
        The module, or what takes its place if it is a batch norm itself.
    """
    made: dict[nn.Module | None, _BatchNorm] = {}
    for old in module.modules():
        if isinstance(old, _BatchNorm):
            new = made[old] = make(old)
            new._parameters.update(old._parameters)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                new._buffers[name] = old._buffers[name]
            new.train(old.training)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():  # a layer may have two names
            parent._modules[name] = made.get(child, child)
    return made.get(module, module)


def expect_micro_batches(module: nn.Module, number: int) -> None:
    """Tells all deferred batch norms within a module how many micro-batches come: a short mini-batch gives fewer."""
    for child in module.modules():
        if isinstance(child, DeferredBatchNorm):
            child.chunks = number
