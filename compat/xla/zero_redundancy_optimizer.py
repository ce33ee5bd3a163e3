"""torch_xla.distributed.zero_redundancy_optimizer on shardkit's OSS (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from shardkit.errors import ConfigurationError
from shardkit.extra.reducing_oss import ReducingOSS
from shardkit.types import StateDict, Tree
from shardkit.xla.ranks import group_among

__all__ = ["ZeroRedundancyOptimizer"]

Groups = Sequence[Sequence[int]]


class ZeroRedundancyOptimizer(ReducingOSS):
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
        params: ParamsT,
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
        **defaults: Tree,
    ) -> None:
        group = None if sharding_groups is None else group_among(sharding_groups)
        super().__init__(
            params,
            optimizer_class,
            group,
            grad_clipping=grad_clipping,
            max_norm=1.0 if max_norm is None else max_norm,
            also_over=None if grad_norm_groups is None else group_among(grad_norm_groups),
            **defaults,
        )
        others = {p.dtype for p in self._parameters()} - {optimizer_dtype}
        if optimizer_dtype is not None and others:
            raise ConfigurationError(
                f"optimizer_dtype={optimizer_dtype}, but there are parameters of {sorted(map(str, others))}; keep "
                "parameters in the optimizer's dtype and compute in another one (autocast, or FSDP's compute_dtype)"
            )
        self.optimizer_class = optimizer_class

    @property
    def base_optimizer(self) -> Optimizer:
        """The inner optimizer of this rank's part."""
        return self.optim

    def init_zero(self) -> None:
        """Takes note of parameters that were frozen or unfrozen."""
        self.refresh_trainable()

    def state_dict(self, all_ranks: bool = True) -> StateDict:
        """The whole optimizer's state, on every rank (collective); loads at any world size."""
        return super().state_dict(all_ranks=all_ranks)
