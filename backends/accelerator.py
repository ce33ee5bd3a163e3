"""Devices with streams, one process each, and process groups of torch.distributed that serve them.

What torch.accelerator and a registered library of collectives have in common is here, so that any device that torch
knows is served (:class:`OfTorch`). Those of which more is known are classes like
:class:`~shardkit.backends.cuda.CudaBackend`: their names, and the group class of their library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from shardkit.backend import Backend, Copy, Group
from shardkit.errors import BackendError, ConfigurationError
from shardkit.types import ProcessGroup

from .c10d.group import C10dGroup, KnownGroups
from .c10d.stream_group import LibraryGroup
from .eager import EagerBackend
from .processes import StartsProcesses


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


class AcceleratorBackend(EagerBackend, StartsProcesses):
    """Tensors of one kind of accelerator, one process for each device.

    Attributes:
        advice: what to do where there is no such device.
    """

    advice: ClassVar[str] = "this torch was built without it, or no device is visible"
    one_order = True

    def __init__(self) -> None:
        self._groups = KnownGroups(self, self._make_group)
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

    def group(self, process_group: ProcessGroup = None) -> Group:
        """See :meth:`shardkit.backend.Backend.group`. Of mixed groups ("cpu:gloo,cuda:nccl") what serves the device."""
        return self._groups.of(process_group)

    def _make_group(
        self, backend: Backend, process_group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int
    ) -> C10dGroup:
        if process_group is None:
            return C10dGroup(backend, None, ranks, rank)
        kind, own = self.device_type, self.process_group_backend
        try:
            serves = process_group._get_backend(torch.device(kind)).name()
        except RuntimeError as error:
            raise ConfigurationError(
                f"rank {rank}: the process group can't carry {kind.upper()} tensors ({error}); make it with backend "
                f"'{own}', or keep the module on the CPU"
            ) from error
        return self._group_type(serves)(backend, process_group, ranks, rank)

    def _group_type(self, serves: str) -> type[C10dGroup]:
        """Chooses a class by what serves the device in a process group; gloo carries its tensors, where it can."""
        return C10dGroup if serves == "gloo" else LibraryGroup

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def _copied(self, out: torch.Tensor, tensor: torch.Tensor, at_once: bool = False) -> Copy:
        to_host = out.device.type == "cpu"
        stream = self._copying.get(to_host)
        if stream is None:
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
