"""Files: what is read is data alone and is checked, what is written is whole or not there."""

from .loading import load
from .prefix import load_with_or_without_prefix, with_prefix, without_prefix
from .saving import save

__all__ = ["load", "load_with_or_without_prefix", "save", "with_prefix", "without_prefix"]
