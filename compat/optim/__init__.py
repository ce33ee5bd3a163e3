"""fairscale.optim."""

from .grad_scaler import GradScaler
from .oss import OSS

__all__ = ["OSS", "GradScaler"]
