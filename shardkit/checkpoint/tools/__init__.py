"""Checkpoints of any kind without a process group: what is in them, whether they are whole, in which they differ, and
other formats of them. One tensor is in memory at a time.
"""

from .comparing import Comparison, Difference, Verified, compare, open_checkpoint, verify
from .converting import Conversion, Converted, convert
from .stored import Checkpoint

__all__ = [
    "Checkpoint",
    "Comparison",
    "Conversion",
    "Converted",
    "Difference",
    "Verified",
    "compare",
    "convert",
    "open_checkpoint",
    "verify",
]
