"""fairscale.experimental.nn.data_parallel.gossip.utils."""

import logging
import sys
from collections import deque
from collections.abc import MutableMapping
from functools import partial

import torch
import torch.distributed as dist

from shardkit.compat.redirected import redirected_names
from shardkit.types import AnyCallable, Tree

# ------------------------------------------------------------ recorders
MAX_LEN_DEQUEUE = 10**4
deque_with_max_len_fixed: partial[deque[float]] = partial(deque, maxlen=MAX_LEN_DEQUEUE)


class EventRecorder:
    def stop(self) -> None:
        """Ends the recording."""


class DummyCudaEventRecorder(EventRecorder):
    """Records nothing."""


def create_event_recorder(event_name: str, dummy: bool = False) -> EventRecorder:
    """Returns a recorder that records nothing; without ``dummy`` an error that says what to take instead."""
    return (
        DummyCudaEventRecorder()
        if dummy
        else redirected_names(f"{__name__}.cuda_metering")("CudaEventRecorder")(event_name)
    )


# ------------------------------------------------------------ groups, loggers, messages
HANDLER_AND_LEVEL_SET: set[logging.Logger] = set()


def create_process_group(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks=ranks)


def make_logger(rank: int, verbose: bool = True) -> logging.Logger:
    """Returns this module's logger, writing to stdout with the rank in front."""
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
        """Returns the message with ``process_num`` of the call, or else of this adapter."""
        number = kwargs.pop("process_num", (self.extra or {}).get("process_num"))
        return f"process: {number} {msg}", kwargs


def flatten_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns a new vector of all elements; the tensors have one dtype."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_tensors(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of a vector in the shapes of these tensors."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def group_by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Returns the tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def communicate(
    tensors: list[torch.Tensor], communication_op: AnyCallable, logger: logging.Logger | None = None
) -> None:
    """Calls ``communication_op(tensor=flat)`` once for each dtype and writes back what it made of ``flat``."""
    for same in group_by_dtype(tensors).values():
        with torch.no_grad():
            flat = flatten_tensors(same)
            communication_op(tensor=flat)
            for tensor, new in zip(same, unflatten_tensors(flat, same), strict=True):
                tensor.copy_(new)
        if logger is not None:
            logger.debug("communicated %d tensors of %s", len(same), flat.dtype)
