"""Batch norm over the batches of all ranks, on any backend.

torch.nn.SyncBatchNorm serves CUDA and torch.distributed only; this one talks through the backend of its input, CPU,
XLA and ranks that are threads included.

Legend of shapes: C channels, N values a channel on all ranks together, W world size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.backend import Group, backend_for
from shardkit.errors import ConfigurationError
from shardkit.pipeline.pipe import replace_batch_norms
from shardkit.types import Context, ProcessGroup, Tree
from shardkit.wrapping.activations import is_recomputing, once


class Statistics(NamedTuple):
    """Holds those of the batches of all ranks; [C] each, total is [1]; fp32, or fp64 for fp64 inputs."""

    mean: torch.Tensor
    var: torch.Tensor  # biased: divided by N
    total: torch.Tensor  # N


def _reduced_dims(input: torch.Tensor) -> list[int]:
    return [d for d in range(input.dim()) if d != 1]


@torch.no_grad()
def batch_statistics(input: torch.Tensor, group: Group) -> Statistics:
    """Returns mean and variance of each channel over all ranks; every rank calls it, also with an empty batch.

    One collective: each rank's mean and variance, which are combined with Chan's formula. E[x²] - E[x]², which sums
    alone would give, loses all digits where the mean is large.

    Args:
        input: [batch, C, ...].
    """
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    channels = x.shape[1]
    mine = x.new_zeros(2 * channels + 1)
    if x.numel() > 0:
        var, mean = torch.var_mean(x, _reduced_dims(x), correction=0)
        mine = torch.cat([mean, var, x.new_full((1,), x.numel() // channels)])
    everybody = x.new_empty(group.world_size * mine.numel())
    group.all_gather_into(everybody, mine, label="batch statistics")
    means, variances, counts = everybody.view(group.world_size, -1).split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    share = counts / count.clamp(min=1)  # [W, 1]
    mean = (means * share).sum(0)
    var = ((variances + (means - mean).square()) * share).sum(0)
    return Statistics(mean, var, count)


class _Normalizing(Context):
    group: Group


class _Normalize(torch.autograd.Function):
    """``apply(input, weight, bias, statistics, eps, group)``; backward goes through the statistics as well."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Normalizing,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: Statistics,
        eps: float,
        group: Group,
    ) -> torch.Tensor:
        mean, var, count = statistics
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + eps), count)  # type: ignore[arg-type]
        ctx.group = group
        if input.numel() == 0:
            return torch.zeros_like(input)
        # torch's kernel takes statistics that are wider than the input only with weights of their width
        if weight is None or weight.dtype != mean.dtype:
            weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
            bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: _Normalizing, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        input, weight, mean, invstd, count = ctx.saved_tensors
        dims = _reduced_dims(input)

        def along(values: torch.Tensor) -> torch.Tensor:  # [C] -> [1, C, 1, ...]
            return values.view(1, -1, *[1] * (input.dim() - 2))

        grad = grad_output.to(mean.dtype)
        normalized = (input.to(mean.dtype) - along(mean)) * along(invstd)
        of_bias = grad.sum(dims)  # [C]
        of_weight = (grad * normalized).sum(dims)  # [C]
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight])  # [2 C]
            ctx.group.all_reduce(sums, label="gradients of batch statistics")
            mean_grad, mean_product = (sums / count.clamp(min=1)).chunk(2)
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            grad_input = (grad - along(mean_grad) - normalized * along(mean_product)) * along(scale)
            grad_input = grad_input.to(input.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = of_weight.to(weight.dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            grad_bias = of_bias.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm of inputs [batch, C, ...] whose statistics in training are those of all ranks' batches together.

    Batches may differ in size between ranks, empty ones included. Gradients of weight and bias are those of the
    rank's own batch, as everywhere in data parallel training. Under activation checkpointing, statistics are
    exchanged and tracked once. Without ranks, and in eval mode, it is a plain batch norm.

    Where it departs from fairscale's: ``num_batches_tracked`` counts and ``momentum=None`` works; statistics are exact
    (fp32 at least, no cancellation) and take one collective in place of two; one checkpointed module may be called
    several times before backward.

    Args:
        process_group: whose ranks share statistics; default: all.
        *args, **kwargs: as of torch.nn.BatchNorm2d.
    """

    def __init__(self, *args: Tree, process_group: ProcessGroup = None, **kwargs: Tree) -> None:
        super().__init__(*args, **kwargs)
        self._process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigurationError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape {tuple(input.shape)}; "
                f"it takes [batch, {self.num_features}, ...]"
            )

    def _group(self, input: torch.Tensor) -> Group | None:
        """Returns the ranks to share statistics with; None: there are no others."""
        backend = backend_for([input])
        try:
            group = backend.group(self._process_group)
        except ConfigurationError:
            if self._process_group is not None:
                raise
            return None  # no ranks were started
        return group.channel("batch norm") if group.world_size > 1 else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        group = self._group(input) if self.training else None
        if group is None:
            return super().forward(input)
        statistics = once(lambda: batch_statistics(input, group))
        if self.track_running_stats and not is_recomputing():
            self._track(statistics)
        return _Normalize.apply(input, self.weight, self.bias, statistics, self.eps, group)

    @torch.no_grad()
    def _track(self, statistics: Statistics) -> None:
        mean, var, count = statistics
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup = None) -> nn.Module:
        """Puts layers of this class in the place of all of torch's batch norms within a module.

        Parameters and buffers stay the same objects; so do layers that are used twice.

        Args:
            process_group: whose ranks share statistics; default: all.

        Returns:
            The module, or its replacement if it is a batch norm itself.
        """

        def make(old: _BatchNorm) -> SyncBatchNorm:
            options = old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats
            made = cls(*options, process_group=process_group)
            if hasattr(old, "qconfig"):
                made.qconfig = old.qconfig
            return made

        return replace_batch_norms(module, make)
