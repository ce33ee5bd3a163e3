"""fairscale.experimental.optim."""

from shardkit.extra.dynamic_loss_scaler import DynamicLossScaler

__all__ = ["DynamicLossScaler"]
