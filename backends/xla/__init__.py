"""XLA devices through torch_xla: TPUs, and replicas with real XLA collectives on a machine without one.

``metrics`` (compiles, collectives in the program) is imported on its own, as it needs torch_xla.
"""

from .backend import XlaBackend
from .pool import ReplicaPool

__all__ = ["ReplicaPool", "XlaBackend"]
