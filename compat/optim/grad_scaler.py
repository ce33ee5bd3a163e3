"""fairscale.optim.grad_scaler."""

from torch.amp.grad_scaler import OptState

from shardkit.internal.version import torch_version
from shardkit.training.grad_scaler import GradScaler, ShardedGradScaler

__all__ = [
    "GradScaler",
    "OptState",
    "ShardedGradScaler",
    "torch_version",
]
