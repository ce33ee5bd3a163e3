"""fairscale.experimental.nn.data_parallel.gossip.utils.helpers."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

from shardkit.extra.gossip.messages import communicate, flatten_tensors, group_by_dtype, unflatten_tensors

__all__ = [
    "MultiProcessAdapter",
    "communicate",
    "create_process_group",
    "flatten_tensors",
    "group_by_dtype",
    "make_logger",
    "unflatten_tensors",
]

HANDLER_AND_LEVEL_SET: set[logging.Logger] = set()


def create_process_group(ranks: list[int]) -> Any:
    """``torch.distributed.new_group(ranks)``."""
    return dist.new_group(ranks=ranks)


def make_logger(rank: int, verbose: bool = True) -> logging.Logger:
    """This module's logger, writing to stdout with the rank in front."""
    logger = logging.getLogger(__name__)
    if logger not in HANDLER_AND_LEVEL_SET:
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setFormatter(logging.Formatter(f"{rank}: %(levelname)s -- %(threadName)s -- %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        HANDLER_AND_LEVEL_SET.add(logger)
    return logger


class MultiProcessAdapter(logging.LoggerAdapter):
    """Puts the number of the process in front of messages."""

    def process(self, msg: str, kwargs: Any) -> tuple[str, MutableMapping[str, Any]]:
        """The message with ``process_num`` of the call, or else of this adapter."""
        number = kwargs.pop("process_num", (self.extra or {}).get("process_num"))
        return f"process: {number} {msg}", kwargs
