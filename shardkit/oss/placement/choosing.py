"""Which placement an optimizer gets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn, optim

from ...backend import Group
from ...errors import ConfigurationError
from ...optimizers.elementwise import is_known_elementwise, names_of_elementwise
from .base import OnEveryRank, Placement
from .flat_segment import FlatSegment
from .in_segments import InSegments
from .owned_parameters import OwnedParameters

logger = logging.getLogger("shardkit")


def placement_for(
    optimizer_class: object,
    even_shards_only: bool,
    update_dtype: torch.dtype | None = None,
    kind: type[FlatSegment] = FlatSegment,
) -> Callable[[Group, Mapping[nn.Parameter, int], torch.dtype | None], Placement]:
    """Makes the placement of an optimizer's parameters; warns if state is not sharded though the class might shard.

    Args:
        optimizer_class: the inner optimizer's.
        even_shards_only: all ranks run one compiled graph.
        update_dtype: another one than the parameters', in which they are updated.
        kind: of segments, where there are any.

    Raises:
        ConfigurationError: ``update_dtype`` for an optimizer that is not known to be element-wise.
    """
    plain = optimizer_class.func if isinstance(optimizer_class, functools.partial) else optimizer_class
    if update_dtype is not None:
        if not is_known_elementwise(plain):
            name = plain.__name__ if isinstance(plain, type) else plain
            raise ConfigurationError(
                f"parameters are to be updated in {update_dtype}, and {name} is not known to be element-wise; update "
                "them in their own dtype, or tell shardkit with declare_elementwise if it is. Known are "
                f"{names_of_elementwise()}"
            )
        return functools.partial(InSegments, update_dtype=update_dtype, kind=kind)
    if isinstance(plain, type) and issubclass(plain, optim.LBFGS):
        return OnEveryRank
    if (even_shards_only or kind.has_parts) and is_known_elementwise(plain):
        return InSegments if kind is FlatSegment else functools.partial(InSegments, kind=kind)
    if not even_shards_only:
        return OwnedParameters
    logger.warning(
        "%s is not known to be element-wise, so each rank runs it on all parameters and its state is not sharded",
        plain.__name__ if isinstance(plain, type) else plain,
    )
    return OnEveryRank
