"""torch.distributed.fsdp.sharded_grad_scaler: shardkit's ShardedGradScaler with torch's arguments."""

from __future__ import annotations

import torch

from shardkit.training import grad_scaler
from shardkit.types import ProcessGroup, Tree

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(grad_scaler.ShardedGradScaler):
    """See :class:`shardkit.ShardedGradScaler`: an overflow on one rank skips the step on all.

    Args:
        device: accepted; the device is that of what is scaled first.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as of :class:`torch.amp.GradScaler`.
        process_group: ranks that decide together; None for all.

    Raises:
        ConfigurationError: ``growth_factor`` is not above, or ``backoff_factor`` not below 1.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup = None,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled, process_group)

    def scale(self, outputs: Tree) -> Tree:
        """As of :class:`torch.amp.GradScaler`; a tensor keeps its dtype."""
        scaled = super().scale(outputs)
        return scaled.to(outputs.dtype) if isinstance(outputs, torch.Tensor) else scaled
