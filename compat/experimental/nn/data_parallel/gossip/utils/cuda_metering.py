"""fairscale.experimental.nn.data_parallel.gossip.utils.cuda_metering: replaced by torch's profiler."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from shardkit.redirected import redirected, redirected_function

__all__ = [
    "CudaEventRecorder",
    "DummyCudaEventRecorder",
    "EventRecorder",
    "create_and_record_event",
    "create_event_recorder",
]

MAX_LEN_DEQUEUE = 10**4
deque_with_max_len_fixed: Any = partial(deque, maxlen=MAX_LEN_DEQUEUE)

_PATH = "experimental.nn.data_parallel.gossip.utils.cuda_metering"
_PROFILER = {"instead": "torch.profiler.profile", "why": "it times phases on any device, without extra code"}
CudaEventRecorder = redirected(f"{_PATH}.CudaEventRecorder", **_PROFILER)
create_and_record_event = redirected_function(f"{_PATH}.create_and_record_event", **_PROFILER)


class EventRecorder:
    """Something that can be stopped."""

    def stop(self) -> None:
        """Ends the recording."""


class DummyCudaEventRecorder(EventRecorder):
    """Records nothing."""


def create_event_recorder(event_name: str, dummy: bool = False) -> Any:
    """A recorder that records nothing; without ``dummy`` an error that says what to take instead."""
    return DummyCudaEventRecorder() if dummy else CudaEventRecorder(event_name)
