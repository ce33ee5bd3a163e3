"""torch.distributed.fsdp.wrap: which submodules become units. The policies are torch's."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import __all__, _or_policy  # noqa: F401
