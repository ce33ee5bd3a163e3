"""What a step costs, counted: the same on every run, whatever else the machine does.

Each counter is a context manager around some work of this rank.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit

PACKAGE = f"{Path(shardkit.__file__).parent}/"  # a checkout may be named as the package is


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def ideal_bytes(name: str, args: Sequence[Any], world_size: int) -> float:
    """Bytes that a rank has to send for a c10d operation, averaged over ranks, if it is done as well as possible.

    A rooted operation is charged to all ranks alike: a broadcast of S bytes sends S (W-1) from its root,
    S (W-1) / W each.
    """
    share = (world_size - 1) / world_size
    if name == "allreduce_":
        return 2 * _bytes(args[0]) * share
    if name in ("broadcast_", "reduce_"):
        return _bytes(args[0]) * share
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return _bytes(args[0]) * share  # the outputs
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return _bytes(args[1]) * share  # the inputs
    if name == "alltoall_base_":
        _, sent, _, _, splits = args[:5]
        if not splits:
            return _bytes(sent) * share
        return (sum(splits) - splits[dist.get_rank()]) * sent[:1].numel() * sent.element_size()
    if name == "alltoall_":
        return _bytes(args[1]) * share
    if name in ("gather_", "scatter_"):
        return max(_bytes(args[0]), _bytes(args[1])) * share
    if name == "send":
        return float(_bytes(args[0]))
    if name in ("recv_", "recv_any_source_", "barrier", "monitored_barrier_"):
        return 0.0
    raise NotImplementedError(f"c10d::{name}: say what it has to send")


# Operations whose only purpose is to put values elsewhere, to clear, to scale or to accumulate them.
_MOVING = frozenset(
    {
        *("_to_copy", "cat", "clone", "copy_", "lift_fresh_copy", "split_with_sizes_copy", "stack"),
        *("fill_", "full", "new_zeros", "ones", "ones_like", "zero_", "zeros", "zeros_like"),
        *("add_", "div_", "mul_"),
    }
)
_MOVING_LISTS = frozenset(f"_foreach_{name}_" for name in ("copy", "zero", "mul", "div"))


def moved_bytes(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that an operation writes, if all it does is to copy, clear, scale or accumulate; else 0.

    Lists that are added to others are sums over ranks, which are computed.
    """
    if name in _MOVING_LISTS:
        return _bytes(args[0])
    out = kwargs.get("out")
    if name in _MOVING or (name in ("mul", "div") and out is not None):
        return _bytes(result if out is None else out)
    return 0


class OperationCounter(TorchDispatchMode):
    """Dispatched ATen operations, and collectives with their bytes.

    Attributes:
        operations: number of ATen operations.
        collectives: name -> number, of all that move more than ``least`` bytes.
        sent: ideal bytes of all collectives.
        moved: bytes that were written without computing anything new (see :func:`moved_bytes`).
    """

    def __init__(self, world_size: int, least: int = 1024) -> None:
        super().__init__()
        self._world_size, self._least = world_size, least
        self.operations = 0
        self.by_name: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0
        self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            sent = ideal_bytes(name, args, self._world_size)
            self.sent += sent
            if sent > self._least or self._world_size == 1:
                self.collectives[name] += 1
            return func(*args, **(kwargs or {}))
        self.operations += 1
        self.by_name[name] += 1
        result = func(*args, **(kwargs or {}))
        self.moved += moved_bytes(name, args, kwargs or {}, result)
        return result


class CallCounter:
    """Calls of Python functions (not of built-in ones) in this thread.

    Attributes:
        calls: their number.
        by_function: (file, function) -> number.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.by_function: Counter[tuple[str, str]] = Counter()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls += 1
            self.by_function[(frame.f_code.co_filename, frame.f_code.co_qualname)] += 1

    def __enter__(self) -> CallCounter:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self.calls -= 1  # this method


class Memory(NamedTuple):
    """Bytes in tensors.

    Attributes:
        resident: at the end of the last step.
        peak: at most during the last step.
    """

    resident: int
    peak: int


def _watch_all_threads() -> None:
    """Makes torch's allocator keep books for all threads, not only profiled ones: gloo's give tensors back, too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(when, change, bytes held after it) of each allocation and release in a profile."""
    for event in events:
        if event.tag == _EventType.Allocation:
            details = event.typed[1]
            yield event.start_time_ns, details.alloc_size, details.total_allocated
        yield from _allocations(event.children)


def memory_of(build: Callable[[], Any], step: Callable[[Any, int], None], steps: int = 3) -> Memory:
    """Builds something, runs steps, and reports the last one, from every allocation since the build began.

    It sees what no Python object shows: temporaries inside of operations and storages that are resized.
    """
    gc.collect()
    _watch_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        built = build()
        for count in range(steps):
            with record_function(f"figures::step {count}"):
                step(built, count)
        time.sleep(0.2)  # other threads may be about to release what they sent
        # what they released shows with the next allocation of this one
        end = torch.empty(1)
    del built, end
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    changes = sorted(_allocations(results.experimental_event_tree()))
    begin = next(e.start_ns() for e in results.events() if e.name() == f"figures::step {steps - 1}")
    before = changes[0][2] - changes[0][1]
    peak = max(held for when, _, held in changes if when >= begin)
    return Memory(changes[-1][2] - before, peak - before)


def live_tensor_bytes() -> int:
    """Bytes in all storages that Python objects reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_sparse and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection in between: its callbacks would be counted."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
