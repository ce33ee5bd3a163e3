"""fairscale.experimental.optim."""

from shardkit.experimental.optim.dynamic_loss_scaler import DynamicLossScaler

__all__ = ["DynamicLossScaler"]
