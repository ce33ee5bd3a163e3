"""Evaluation on several ranks: every sample once, and what they found in one place."""

from .gathering import gather, gather_tensors
from .sampling import EvaluationSampler, in_step

__all__ = ["EvaluationSampler", "gather", "gather_tensors", "in_step"]
