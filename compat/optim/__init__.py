"""fairscale.optim."""

from torch.amp.grad_scaler import OptState

from shardkit.optim.adam import Adam, Precision
from shardkit.training.grad_scaler import GradScaler

from .adascale import AdaScale, AdaScaleWrapper
from .oss import OSS

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]
