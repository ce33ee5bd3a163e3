"""Which modules become units, and how they are wrapped."""

from .context import auto_wrap, enable_wrap, wrap

__all__ = ["auto_wrap", "enable_wrap", "wrap"]
