"""fairscale.experimental.optim."""

from .dynamic_loss_scaler import DynamicLossScaler

__all__ = ["DynamicLossScaler"]
