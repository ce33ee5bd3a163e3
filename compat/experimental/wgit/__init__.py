"""fairscale.experimental.wgit: version control for weights, an experiment that was never finished."""

from .repo import Repo
from .signal_sparsity import Algo, SignalSparsity, random_sparse_mask
from .signal_sparsity_profiling import EnergyConcentrationProfile
from .version import __version_tuple__

__all__ = [
    "Algo",
    "EnergyConcentrationProfile",
    "Repo",
    "SignalSparsity",
    "__version_tuple__",
    "random_sparse_mask",
]
