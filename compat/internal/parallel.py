"""fairscale.internal.parallel."""

from torch import nn

from shardkit.redirected import redirected_names

__getattr__ = redirected_names(__name__)


def enable_pytorch_sync_bn(module: nn.Module) -> None:
    """Older torch needed to be told of SyncBatchNorm's device count; today's does not: nothing to do."""
