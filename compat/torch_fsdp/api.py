"""torch.distributed.fsdp.api: what arguments and state dicts are configured by. The classes are torch's."""

from torch.distributed.fsdp.api import *  # noqa: F403
from torch.distributed.fsdp.api import __all__ as __all__
