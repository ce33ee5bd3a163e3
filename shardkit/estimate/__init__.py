"""What a training would take, found without any memory: the real wrapping and a real step, on meta tensors."""

from .experiments import from_experiment, from_hugging_face
from .searching import smallest_ranks
from .stepping import Estimate, Subject, estimate
from .strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Estimate",
    "Subject",
    "estimate",
    "from_experiment",
    "from_hugging_face",
    "smallest_ranks",
]
