"""fairscale.optim."""

from torch.amp.grad_scaler import OptState

from shardkit.compat.redirected import redirected_names
from shardkit.optim.adam import Adam, Precision
from shardkit.training.grad_scaler import GradScaler

from .adascale import AdaScale, AdaScaleWrapper
from .oss import OSS

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]

__getattr__ = redirected_names(__name__)
