"""fairscale.optim."""

import torch
from torch.amp.grad_scaler import OptState

from shardkit.optim.adam import Adam, Precision
from shardkit.training import grad_scaler

from .adascale import AdaScale, AdaScaleWrapper
from .oss import OSS

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]


class GradScaler(grad_scaler.GradScaler, torch.cuda.amp.GradScaler):  # noqa: TID251 - a name alone
    """shardkit's, of the class of torch's that annotations of fairscale's users name, on any device."""


class ShardedGradScaler(grad_scaler.ShardedGradScaler, torch.cuda.amp.GradScaler):  # noqa: TID251 - a name alone
    """The same of shardkit's ShardedGradScaler."""
