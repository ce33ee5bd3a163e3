"""fairscale.optim."""

from shardkit.optim.adam import Adam, Precision

from .adascale import AdaScale, AdaScaleWrapper
from .grad_scaler import GradScaler
from .oss import OSS

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]
