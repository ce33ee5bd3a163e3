"""Checkpoints: of a training, saved and restored by all ranks; single files; and those of other libraries."""

from .files.loading import load, load_with_or_without_prefix, with_prefix, without_prefix
from .files.writing import save

__all__ = ["load", "load_with_or_without_prefix", "save", "with_prefix", "without_prefix"]
