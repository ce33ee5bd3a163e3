"""fairscale.experimental.nn.data_parallel.gossip.utils."""

from .helpers import (
    MultiProcessAdapter,
    communicate,
    create_process_group,
    flatten_tensors,
    group_by_dtype,
    make_logger,
    unflatten_tensors,
)

__all__ = [
    "MultiProcessAdapter",
    "communicate",
    "create_process_group",
    "flatten_tensors",
    "group_by_dtype",
    "make_logger",
    "unflatten_tensors",
]
