"""fairscale.experimental.optim.dynamic_loss_scaler."""

from shardkit.extra.dynamic_loss_scaler import DynamicLossScaler, OptState

__all__ = ["DynamicLossScaler", "OptState"]
