"""fairscale.nn.moe."""

from .moe_layer import MOELayer
from .top2gate import Top2Gate

__all__ = ["MOELayer", "Top2Gate"]
