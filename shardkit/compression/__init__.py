"""Fewer bytes between ranks: numbers travel as blocks of one byte each (ZeRO++, arXiv 2306.10209)."""

from .blocks import BlockFormat
from .choosing import check_compressible, format_for
from .feedback import Feedback
from .gathering import CompressedGather
from .reducing import CompressedAllReduce, CompressedReduceScatter

__all__ = [
    "BlockFormat",
    "CompressedAllReduce",
    "CompressedGather",
    "CompressedReduceScatter",
    "Feedback",
    "check_compressible",
    "format_for",
]
