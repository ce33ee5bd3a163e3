"""fairscale.optim.grad_scaler."""

from torch.amp.grad_scaler import OptState

from shardkit.grad_scaler import GradScaler, ShardedGradScaler

__all__ = ["GradScaler", "OptState", "ShardedGradScaler"]
