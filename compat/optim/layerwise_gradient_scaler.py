"""fairscale.optim.layerwise_gradient_scaler."""

from shardkit.extra.layerwise_gradient_scaler import GradientHelper, LayerInfo, LayerwiseGradientScaler

__all__ = ["GradientHelper", "LayerInfo", "LayerwiseGradientScaler"]
