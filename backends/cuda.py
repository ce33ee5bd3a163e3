"""CUDA devices: NCCL groups, and gloo groups that carry CUDA tensors.

[Note: NCCL] What torch's ProcessGroupNCCL does, as far as it decides what is done here:

- Each has a communicator and two threads (a watchdog and its monitor). Its constructor makes no communicator: without
  ``eager_connect_single_device`` the first collective does, on the host, in the middle of a step.
- ``work.wait()`` makes the current stream wait. With a timeout it blocks the host, and aborts the communicator when
  that is over; so no timeout is ever passed.
- The destructor warns that ``destroy_process_group`` was not called, unless it was shut down or aborted before.
- ``shutdown`` waits for the other ranks, which have to end their communicators in the same order. ``abort`` ends what
  is in flight and waits for nobody; if the driver hangs, it takes as long as the group's timeout.
- The flight recorder lists collectives by the group's name, and ranks by ``global_ranks_in_group``.
- The Python object of a backend ends with its last Python reference, although the process group goes on using what is
  behind it: nothing may be kept by a weak reference to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .accelerator import AcceleratorBackend, StreamGroup
from .c10d.group import C10dGroup
from .connections import process_group_over

_CUDA = torch.device("cuda")
_PREFIX = "shardkit/"
Communicators: TypeAlias = "dict[dist.ProcessGroup, torch.device]"
_FLUSH_SECONDS = 30.0  # for what is in flight when a group ends
_ABORT_SECONDS = 10.0


class NcclGroup(StreamGroup):
    """Ranks of an NCCL process group; see [Note: NCCL]."""

    ends_at_exit = False  # see _end_communicators

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Returns an NCCL communicator of these group ranks, known to them alone (as for gloo: see the base).

        It is connected here, where all of them are, and not when something is in flight.
        """
        parent = str(self.process_group.group_name)
        full_name = f"{_PREFIX}{parent.removeprefix(_PREFIX)}/{name}"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = [self.ranks[r] for r in members]
        options.group_name = full_name  # type: ignore[assignment]
        rank, size = members.index(self.rank), len(members)
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
        pg = process_group_over(nccl, kind, store, rank, size, _CUDA)
        pg._set_group_name(options.group_name)
        pg._set_group_desc(f"shardkit: {name.rpartition('/')[0]}")
        device = self.backend.device()
        nccl.eager_connect_single_device(device)
        _communicators[pg] = device
        return pg

    def close(self) -> None:
        own: Communicators = {}
        self._take_communicators(own)
        super().close()
        end_communicators(own)

    def _take_communicators(self, found: Communicators) -> None:
        """Takes those of all channels and sub-groups, which are the caller's to end from now on."""
        for group in (*self._channels.values(), *self._subgroups):
            if isinstance(group, NcclGroup):
                group._take_communicators(found)
        if self._root is not self and self.process_group in _communicators:
            found[self.process_group] = _communicators.pop(self.process_group)


# Ours, and the device of each. NCCL's threads have to end before the process does; torch ends only those of groups it
# made itself.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_communicators.clear)  # they are the parent's


def end_communicators(communicators: Communicators) -> None:
    """Lets the device come through with what is in flight, and aborts; both for a limited time: ranks may be lost."""
    for device in set(communicators.values()):
        _within(_FLUSH_SECONDS, functools.partial(torch.cuda.synchronize, device))
    deadline = time.monotonic() + _ABORT_SECONDS
    for process_group in communicators:
        _within(deadline - time.monotonic(), process_group.abort)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Calls it, and goes on without it when the time is over."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError):  # an error of the device has been raised elsewhere before
            call()

    helper = threading.Thread(target=quietly, name="shardkit-nccl-end", daemon=True)
    try:
        helper.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread at exit
        quietly()
    else:
        helper.join(max(0.0, seconds))


@atexit.register
def _end_communicators() -> None:
    end_communicators(dict(_communicators))


class CudaBackend(AcceleratorBackend):
    """CUDA tensors, one process a rank."""

    name = "cuda"
    device_type = "cuda"
    process_group_backend = "cpu:gloo,cuda:nccl"  # torch saves checkpoints in the background over gloo
    advice = "this torch was built without CUDA, or no device is visible"

    def _in_use(
        self, out: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream
    ) -> Sequence[torch.Tensor]:
        """Does nothing: the allocators of the device and of pinned memory know of the stream."""
        (out if out.is_cuda else tensor).record_stream(stream)
        return ()

    def _group_type(self, serves: str) -> type[C10dGroup]:
        return NcclGroup if serves == "nccl" else C10dGroup
