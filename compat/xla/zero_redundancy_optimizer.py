"""torch_xla.distributed.zero_redundancy_optimizer on shardkit's OSS (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardkit.backend import ReduceOp
from shardkit.errors import ConfigurationError
from shardkit.oss.optimizer import OSS
from shardkit.xla.ranks import group_among

__all__ = ["ZeroRedundancyOptimizer"]

Groups = Sequence[Sequence[int]]


class ZeroRedundancyOptimizer(OSS):
    """Reduces gradients, clips them and steps, with its state sharded over ranks: see :class:`shardkit.OSS`.

    A parameter's state is with one rank as a whole (torch_xla cuts parameters along dimension 0), so that optimizers
    which need whole parameters, such as LAMB, give the results of one process.

    Args:
        params: as for any optimizer.
        optimizer_class: the inner optimizer.
        optimizer_dtype: that of the parameters; None for the same.
        grad_clipping: clip by the norm of all gradients.
        max_norm: its limit, 1.0 by default.
        sharding_groups: partition of all ranks; state is sharded, and gradients averaged, within this rank's part.
        grad_norm_groups: partition over which squared norms are added up too (parts of the model on other ranks).
        pin_layout, bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: accepted; no effect.
        use_grad_acc_hook, save_master_weights, higher_cc_precision: accepted; no effect.
        lazy_init: accepted; state is laid out at once.
        **defaults: arguments of ``optimizer_class``.

    Raises:
        ConfigurationError: ``optimizer_dtype`` is not that of the parameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Groups | None = None,
        grad_norm_groups: Groups | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        group = None if sharding_groups is None else group_among(sharding_groups)
        super().__init__(params, optimizer_class, group, **defaults)
        others = {p.dtype for p in self._parameters()} - {optimizer_dtype}
        if optimizer_dtype is not None and others:
            raise ConfigurationError(
                f"optimizer_dtype={optimizer_dtype}, but there are parameters of {sorted(map(str, others))}; keep "
                "parameters in the optimizer's dtype and compute in another one (autocast, or FSDP's compute_dtype)"
            )
        self.optimizer_class = optimizer_class
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.grad_norm: torch.Tensor | None = None
        self._norm_group = None if grad_norm_groups is None else group_among(grad_norm_groups)

    @property
    def base_optimizer(self) -> Optimizer:
        """The inner optimizer of this rank's part."""
        return self.optim

    def init_zero(self) -> None:
        """Takes note of parameters that were frozen or unfrozen."""
        self.refresh_trainable()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Averages the gradients over ranks, clips them, updates this rank's part and publishes it.

        Args:
            closure: computes the loss and the gradients first.
            **kwargs: passed to the inner optimizer's ``step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_trainable()
        self._reduce()
        if self.grad_clipping:
            self.grad_norm = self.clip_grad_norm(self.max_norm, also_over=self._norm_group)
        super().step(**kwargs)
        return loss

    @torch.no_grad()
    def _reduce(self) -> None:
        channel = self._group.channel("gradients")
        if segments := self.segments():
            for segment in segments:
                segment.reduce_gradients(channel, None)
            return
        params = [p for p in self._parameters() if p.requires_grad]
        if not params or self.world_size == 1:
            return
        rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
        used = torch.tensor([float(p.grad is not None) for p in params]).to(rows[0])
        flat = torch.cat([*rows, used])
        channel.all_reduce(flat, op=ReduceOp.AVG, label="gradients")
        *parts, used = flat.split([*(p.numel() for p in params), len(params)])
        for p, reduced, share in zip(params, parts, used.tolist(), strict=True):
            if share > 0:  # some rank has a gradient
                p.grad = reduced.view_as(p).to(p.dtype)

    def state_dict(self, all_ranks: bool = True) -> dict[str, Any]:
        """The whole optimizer's state, on every rank (collective); loads at any world size."""
        return super().state_dict(all_ranks=all_ranks)
