"""Devices with streams, one process each, and process groups of torch.distributed that serve them.

What torch.accelerator and a registered library of collectives have in common is here, so that any device that torch
knows is served (:class:`OfTorch`). Those of which more is known are classes like
:class:`~shardkit.backends.cuda.CudaBackend`: their names, and the group class of their library.

[Note: waiting on a stream] NCCL runs on streams of its own. Waiting for one of its works makes the current stream wait
and the host goes on, so nothing here notices that a work does not come to its end (as gloo's slices of time do): NCCL's
watchdog ends such a job after the process group's timeout. What is noticed is another order of calls ([Note: call
order]): the rank that is about to issue what was not predicted waits for an agreement on the host. It finds that
another has gone on, and raises. That one raises when it issues something next; a host that waits for its device by then
is freed, by the end of all that is in flight.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shardkit.backend import DONE, Copy, Group, ReduceOp, Sizes, Work
from shardkit.errors import BackendError, ConfigurationError
from shardkit.types import Tree

from .c10d.group import NUMBERS, OPS, After, C10dBackend, C10dGroup, C10dWork, TorchWork, as_bytes, as_real
from .connections import process_group_over
from .diagnosis.stack_report import Call, CallFacts
from .diagnosis.watchdog import Watch


class EventTimer:
    """Times by events of the device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, first: object, second: object) -> float:
        if not isinstance(first, torch.Event) or not isinstance(second, torch.Event):
            raise TypeError("these are marks of another device's timer")
        return float(first.elapsed_time(second)) / 1000.0


class StreamCopy(Copy):
    """A copy on a stream of its own.

    Args:
        done: comes after it.
        kept: memory that is in use until then.
    """

    __slots__ = ("_done", "_kept")

    def __init__(self, done: torch.Event, kept: Sequence[torch.Tensor]) -> None:
        self._done, self._kept = done, kept

    def is_done(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._done)
        self._kept = ()

    def wait_on_host(self) -> None:
        self._done.synchronize()
        self._kept = ()


class AcceleratorBackend(C10dBackend):
    """Tensors of one kind of accelerator, one process for each device.

    Attributes:
        advice: what to do where there is no such device.
    """

    advice: ClassVar[str] = "this torch was built without it, or no device is visible"
    one_order = True

    def __init__(self) -> None:
        super().__init__()
        self._selected = False
        self._copying: dict[bool, torch.Stream] = {}  # by whether it is to the host

    def is_available(self) -> bool:
        known = torch.accelerator.current_accelerator(check_available=True)
        return known is not None and known.type == self.device_type and dist.is_available()

    def device(self) -> torch.device:
        """Returns the current device. The first call selects the one of ``LOCAL_RANK``, unless the caller chose
        another, or sharded parameters are on another.

        Raises:
            BackendError: there is no such device.
            ConfigurationError: more ranks on this machine than devices.
        """
        if not self.is_available():
            kind = self.device_type
            raise BackendError(
                f"no {kind.upper()} device is available (torch.{kind}.is_available() is False): {self.advice}"
            )
        if not self._selected:
            self._selected = True
            self._select_device()
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def settle(self, device: torch.device) -> None:
        """Selects the device of ``model.to(rank)`` where nobody has: on device 0 of all ranks collectives never end."""
        if self._selected:
            return
        self._selected = True
        if device.index and torch.accelerator.current_device_index() == 0:
            torch.accelerator.set_device_index(device.index)

    def _select_device(self) -> None:
        local_rank, count = os.environ.get("LOCAL_RANK"), torch.accelerator.device_count()
        chosen = torch.accelerator.current_device_index() != 0
        # with one device visible to each process, LOCAL_RANK says nothing
        if local_rank is None or chosen or count == 1:
            return
        if int(local_rank) >= count:
            raise ConfigurationError(
                f"LOCAL_RANK is {local_rank}, but only {count} {self.device_type.upper()} devices are visible; start "
                f"at most {count} ranks on this machine"
            )
        torch.accelerator.set_device_index(int(local_rank))

    def _make_group(self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> C10dGroup:
        """Takes of mixed process groups ("cpu:gloo,cuda:nccl") what serves the device."""
        kind, own = self.device_type, self.process_group_backend
        try:
            serves = process_group._get_backend(torch.device(kind)).name()
        except RuntimeError as error:
            raise ConfigurationError(
                f"rank {rank}: the process group can't carry {kind.upper()} tensors ({error}); make it with backend "
                f"'{own}', or keep the module on the CPU"
            ) from error
        return self._group_type(serves)(self, process_group, ranks, rank)

    def _group_type(self, serves: str) -> type[C10dGroup]:
        """Chooses a class by what serves the device in a process group; gloo carries its tensors, where it can."""
        return C10dGroup if serves == "gloo" else LibraryGroup

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def _copied(self, out: torch.Tensor, tensor: torch.Tensor, at_once: bool = False) -> Copy:
        to_host = out.device.type == "cpu"
        if (stream := self._copying.get(to_host)) is None:
            stream = self._copying[to_host] = torch.Stream(self.device())
        if not at_once:
            stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            out.copy_(tensor, non_blocking=True)
        return StreamCopy(stream.record_event(), self._in_use(out, tensor, stream))

    def _in_use(
        self, out: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream
    ) -> Sequence[torch.Tensor]:
        """Returns what is to be kept until a copy was waited for."""
        return out, tensor

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device())

    def timer(self) -> EventTimer:
        return EventTimer(self.device())

    def rng_state(self) -> torch.Tensor:
        """Returns the state of this rank's device, uint8."""
        return torch.get_device_module(self.device_type).get_rng_state(self.device())

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Sets the state of this rank's device, uint8."""
        torch.get_device_module(self.device_type).set_rng_state(state, self.device())

    def _check_ranks(self, world_size: int) -> None:
        count = self.device_count()
        if world_size > count:
            raise ConfigurationError(
                f"{world_size} ranks need {world_size} {self.device_type.upper()} devices, {count} are visible; launch "
                "fewer ranks, or use backend='gloo' on the CPU"
            )

    def device_count(self) -> int:
        """Counts those that this process sees."""
        return torch.accelerator.device_count() if self.is_available() else 0


class OfTorch(AcceleratorBackend):
    """A device of torch.accelerator of which no more is known than its name, and its library of collectives.

    Args:
        device_type: as ``torch.device`` has it.
        library: as ``torch.distributed`` has it.
    """

    def __init__(self, device_type: str, library: str) -> None:
        super().__init__()
        self.name = self.device_type = device_type
        self.process_group_backend = f"cpu:gloo,{device_type}:{library}"


def of_torch(device_type: str) -> OfTorch | None:
    """Makes the backend of a device that torch knows and a library of collectives serves; None for any other."""
    known = torch.accelerator.current_accelerator()
    if known is None or known.type != device_type or not dist.is_available():
        return None
    library = dist.Backend.default_device_backend_map.get(device_type)
    # "fake" carries nothing: torch has it for devices whose package was not imported
    return None if library in (None, "gloo", "fake") else OfTorch(device_type, library)


# ------------------------------------------------------------ groups whose collectives run on the streams
_OPS = {**OPS, ReduceOp.AVG: dist.ReduceOp(dist.ReduceOp.AVG)}

_DTYPES = NUMBERS | {torch.bool}  # what NCCL adds up


class StreamWork(C10dWork):
    """Works issued as one call; see [Note: waiting on a stream].

    The works keep the tensors that the device still reads, so that their memory is not given to others. Whether the
    device is through with them is asked of an event, without waiting.
    """

    __slots__ = ()

    def __init__(self, group: C10dGroup, works: list[TorchWork], call: CallFacts, after: After) -> None:
        # as the base's, without a call of it
        self._group, self._works, self._call, self._after = group, works, call, after
        if group._watch.failed_elsewhere:
            group._watch.raise_failure(Call(*call))

    def wait(self) -> None:
        """Lets work that is issued from now on in the current stream see the result."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._group._raise(error, Call(*self._call))
        self._works = []
        after, self._after = self._after, None
        if after is not None:
            after()


class StreamGroup(C10dGroup):
    """Buffers are used in place; nothing is copied for contiguous tensors."""

    _ops = _OPS
    _dtypes = _DTYPES
    _work = StreamWork

    def _new_watch(self) -> Watch:
        watch, this = super()._new_watch(), weakref.ref(self)

        def break_waits() -> None:
            group = this()
            for each in () if group is None else (*group._channels.values(), *group._subgroups):
                with contextlib.suppress(RuntimeError):
                    each.process_group.abort()

        watch.break_waits = break_waits
        return watch

    def _probe(self, call: Call) -> None:
        """Does nothing: a send would have to be received."""

    # ------------------------------------------------------------ collectives
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        """Issues one all-gather, or for uneven sizes one broadcast a rank, grouped."""
        if not output.numel():
            return DONE
        numel = output.numel()
        self._follow("all_gather_into", numel, label)
        if output.dtype not in _DTYPES:
            parts = [n * output.element_size() for n in parts]
            output, shard = as_bytes(output), as_bytes(shard)
        if is_even(parts):
            work = self._start(self.process_group._allgather_base, output, shard)
        else:
            pieces = list(torch.split_with_sizes(output, parts))
            work = self._start(self.process_group.allgather, [pieces], [shard])
        return self._issue([work], "all_gather_into", numel, label, async_op)

    _all_gather_others = Group._all_gather_others

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """Issues one reduce-scatter, or for uneven sizes one reduce a rank, grouped (and input is lost)."""
        if input.is_complex():
            parts = [2 * n for n in parts]
            shard, input = as_real(shard), as_real(input)
        self._check_sum("reduce_scatter_into", input)
        if not input.numel():
            return DONE
        options = dist.distributed_c10d.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        if is_even(parts):
            work = self._start(self.process_group._reduce_scatter_base, shard, input, options)
        else:
            pieces = list(torch.split_with_sizes(input, parts))
            work = self._start(self.process_group.reduce_scatter, [shard], [pieces], options)
        return self._issue([work], "reduce_scatter_into", input.numel(), label, async_op)

    def barrier(self, *, label: str = "") -> None:
        """Blocks the host until all ranks are here and their earlier work on the current streams is done."""
        # not the library's own barrier: NCCL's guesses a device from the rank
        here = torch.zeros(1, device=self.backend.device())
        self.all_reduce(here, label=label or "barrier")
        torch.accelerator.current_stream(here.device).synchronize()

    def _check_sum(self, operation: str, tensor: Tensor) -> None:
        """Raises ConfigurationError for what the library can carry but not add up."""
        if tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"rank {self.rank}: {operation} of {tensor.dtype} is not possible on {self.backend.device_type}: its "
                "library does not add up such numbers; convert them to int32, int64 or a floating point dtype first"
            )


def is_even(parts: Sequence[int]) -> bool:
    return parts.count(parts[0]) == len(parts)


class LibraryGroup(StreamGroup):
    """Ranks of a process group of any library of collectives that torch.distributed has for a device.

    A channel is a process group of its own, made as torch makes it: by what the library's package has registered, or by
    torch's own class for it.
    """

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Connects the ranks that call this alone, as torch.distributed.new_group does it for all."""
        rank, size = members.index(self.rank), len(members)
        # what serves the device in the process group that channels and sub-groups are made from
        config = dist.get_backend_config(self._root.of_torch())
        library = dict(pair.split(":") for pair in config.split(","))[self.backend.device_type]
        plugin = dist.Backend._plugins.get(library.upper())
        kind: Tree = dist.ProcessGroup.BackendType.CUSTOM
        if plugin is None:
            kind = getattr(dist.ProcessGroup.BackendType, library.upper(), None)
            made = getattr(dist, f"ProcessGroup{library.upper()}", None)
            if kind is None or made is None:
                raise ConfigurationError(
                    f"torch.distributed does not say how connections of {library!r} are made; use a library that is "
                    "registered with torch.distributed.Backend.register_backend"
                )
            options = made.Options()
            options._timeout = self._timeout
            connected = made(store, rank, size, options)
        elif plugin.extended_api:
            options = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
            options.store, options.group_rank, options.group_size = store, rank, size
            options.timeout = self._timeout
            options.global_ranks_in_group = [self.ranks[r] for r in members]
            options.group_id = f"shardkit/{library}/{name}"
            connected = plugin.creator_fn(options, None)
        else:
            connected = plugin.creator_fn(store, rank, size, self._timeout)
        if isinstance(connected, dist.ProcessGroup):  # of a library that is written in Python
            return connected
        return process_group_over(connected, kind, store, rank, size, torch.device(self.backend.device_type))

    def close(self) -> None:
        own = self.process_group if self._root is not self else None
        super().close()
        if isinstance(own, dist.ProcessGroup):
            with contextlib.suppress(RuntimeError):  # not every library has it
                own.shutdown()
