"""Types of torch.distributed that it does not list where type checkers look; for annotations alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
else:
    Store = object
