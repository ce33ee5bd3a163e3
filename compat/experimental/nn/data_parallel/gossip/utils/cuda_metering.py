"""fairscale.experimental.nn.data_parallel.gossip.utils.cuda_metering: replaced by torch's profiler."""

from __future__ import annotations

from collections import deque
from functools import partial

from shardkit.compat.redirected import redirected_names

MAX_LEN_DEQUEUE = 10**4
deque_with_max_len_fixed: partial[deque[float]] = partial(deque, maxlen=MAX_LEN_DEQUEUE)

__getattr__ = redirected_names(__name__)


class EventRecorder:
    """Something that can be stopped."""

    def stop(self) -> None:
        """Ends the recording."""


class DummyCudaEventRecorder(EventRecorder):
    """Records nothing."""


def create_event_recorder(event_name: str, dummy: bool = False) -> EventRecorder:
    """A recorder that records nothing; without ``dummy`` an error that says what to take instead."""
    return DummyCudaEventRecorder() if dummy else __getattr__("CudaEventRecorder")(event_name)
