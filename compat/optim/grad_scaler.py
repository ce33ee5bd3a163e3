"""fairscale.optim.grad_scaler."""

from torch.amp.grad_scaler import OptState

from shardkit.grad_scaler import GradScaler, ShardedGradScaler
from shardkit.internal.version import torch_version

__all__ = [
    "GradScaler",
    "OptState",
    "ShardedGradScaler",
    "torch_version",
]
