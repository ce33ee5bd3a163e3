"""Files: what is read is data alone and is checked, what is written is whole or not there."""

from .files.loading import load
from .files.saving import save
from .prefix import load_with_or_without_prefix, with_prefix, without_prefix

__all__ = ["load", "load_with_or_without_prefix", "save", "with_prefix", "without_prefix"]
