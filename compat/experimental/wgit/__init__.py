"""fairscale.experimental.wgit: version control for weights, an experiment that was never finished."""

from shardkit.compat.redirected import redirected_names

from .utils import Algo as Algo
from .version import __version_tuple__ as __version_tuple__

__getattr__ = redirected_names(__name__)
