"""fairscale.experimental.wgit: version control for weights, an experiment that was never finished."""

from shardkit.redirected import redirected_names

from .utils import Algo
from .version import __version_tuple__

__all__ = [
    "Algo",
    "EnergyConcentrationProfile",
    "Repo",
    "SignalSparsity",
    "__version_tuple__",
    "random_sparse_mask",
]

__getattr__ = redirected_names(__name__)
