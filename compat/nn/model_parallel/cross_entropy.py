"""fairscale.nn.model_parallel.cross_entropy."""

from shardkit.model_parallel.regions import vocab_parallel_cross_entropy

from .initialize import get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size
from .utils import VocabUtility

__all__ = [
    "VocabUtility",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "vocab_parallel_cross_entropy",
]
