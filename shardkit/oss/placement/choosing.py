"""Which placement an optimizer gets."""

from __future__ import annotations

import functools
import logging

from torch import optim

from ...optimizers.elementwise import is_known_elementwise
from .base import Placement
from .in_segments import InSegments
from .on_every_rank import OnEveryRank
from .owned_parameters import OwnedParameters

logger = logging.getLogger("shardkit")


def placement_for(optimizer_class: object, even_shards_only: bool) -> type[Placement]:
    """The placement of an optimizer's parameters; warns if state is not sharded though the class might shard.

    Args:
        optimizer_class: the inner optimizer's.
        even_shards_only: all ranks run one compiled graph.
    """
    plain = optimizer_class.func if isinstance(optimizer_class, functools.partial) else optimizer_class
    if isinstance(plain, type) and issubclass(plain, optim.LBFGS):
        return OnEveryRank
    if not even_shards_only:
        return OwnedParameters
    if is_known_elementwise(plain):
        return InSegments
    logger.warning(
        "%s is not known to be element-wise, so each rank runs it on all parameters and its state is not sharded",
        plain.__name__ if isinstance(plain, type) else plain,
    )
    return OnEveryRank
