"""Training data whose place is a number: every sample once, whatever is killed, resumed, and on how many ranks."""

from .loader import ResumableLoader
from .sampler import GlobalBatchSampler

__all__ = ["GlobalBatchSampler", "ResumableLoader"]
