"""fairscale.experimental.nn.data_parallel.gossip.utils.helpers."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping

import torch.distributed as dist

from shardkit.redirected import redirected_names
from shardkit.types import Tree

__getattr__ = redirected_names(__name__)


HANDLER_AND_LEVEL_SET: set[logging.Logger] = set()


def create_process_group(ranks: list[int]) -> dist.ProcessGroup:
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

    def process(self, msg: str, kwargs: MutableMapping[str, Tree]) -> tuple[str, MutableMapping[str, Tree]]:
        """The message with ``process_num`` of the call, or else of this adapter."""
        number = kwargs.pop("process_num", (self.extra or {}).get("process_num"))
        return f"process: {number} {msg}", kwargs
