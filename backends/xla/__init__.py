"""XLA devices through torch_xla: TPUs, and replicas with real XLA collectives on a machine without one.

Nothing here imports torch_xla before it is needed: the process that launches replicas must not start a runtime
of its own. ``metrics`` (compiles, collectives in the program) is imported on its own, as it needs torch_xla.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.backend import Backend, Group, Pool
from shardkit.errors import BackendError, ConfigurationError
from shardkit.types import ProcessGroup

from .pool import DevicePool, ReplicaPool

if TYPE_CHECKING:
    from .runtime import Replica, World

__all__ = ["ReplicaPool", "XlaBackend"]


class XlaBackend(Backend):
    """See :class:`shardkit.backend.Backend`. Execution is lazy: :meth:`mark_step` runs what was recorded."""

    name = "xla"
    device_type = "xla"
    even_shards_only = True
    has_storage = False
    process_group_backend = "xla"

    def __init__(self) -> None:
        self._runtime_replicas: dict[int, Replica] = {}

    def is_available(self) -> bool:
        return importlib.util.find_spec("torch_xla") is not None

    def device(self) -> torch.device:
        """Returns the default XLA device of this thread."""
        import torch_xla

        return torch_xla.device()

    def group(self, process_group: ProcessGroup = None) -> Group:
        from .group import as_group

        return as_group(self, self._replica(), process_group)

    def take_storage(self, tensor: torch.Tensor) -> None:
        """Does nothing: a lazy tensor owns no memory of its own. Assign a new value to it instead."""

    def release_storage(self, tensor: torch.Tensor) -> None:
        """Does nothing: XLA frees a buffer once no tensor and no pending graph refers to its value. Drop the tensor."""

    def synchronize(self) -> None:
        self.mark_step(wait=True)

    def mark_step(self, *, wait: bool = False) -> None:
        """Runs what was recorded so far on this rank's device."""
        import torch_xla

        torch_xla.sync(wait=wait)

    def tie(self, tensors: Sequence[torch.Tensor]) -> None:
        """Issues an optimization barrier: XLA neither merges nor moves operations across it."""
        import torch_xla

        mine = [t for t in tensors if t.device.type == "xla"]
        if mine:
            torch_xla._XLAC._xla_optimization_barrier_(mine)

    def rng_state(self) -> torch.Tensor:
        """Returns the device's seed, int64 [1]. Host generators are not part of it."""
        import torch_xla.core.xla_model as xm

        seed = xm.get_rng_state()
        return torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed], dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(state) % (1 << 64))

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        """Returns all TPU cores (or one), or ``world_size`` replicas if there is no TPU."""
        if not self.is_available():
            raise BackendError("torch_xla is not installed; install shardkit[xla] on Linux")
        if has_accelerator():
            return DevicePool(world_size, timeout, start_timeout)
        return ReplicaPool(world_size, timeout=timeout, start_timeout=start_timeout)

    def _replica(self) -> Replica:
        import torch_xla

        from .runtime import current_world, runtime_replica

        world = current_world()
        if world is not None:
            replica = world.here().replica
            if replica is None:
                raise ConfigurationError(
                    "this thread's device has no running replica; call from a launched function"
                )
            return replica
        ordinal = torch_xla._XLAC._xla_get_default_device_ordinal()
        if ordinal not in self._runtime_replicas:
            replica = runtime_replica()
            started = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            if replica.world_size == 1 < started:  # else each would train by itself, unnoticed
                raise ConfigurationError(
                    f"rank {dist.get_rank()} is one of {started} processes, but its XLA runtime connects to no other: "
                    "on a CPU, replicas are threads; start them with shardkit.launch(..., backend='xla'), without "
                    "torchrun"
                )
            self._runtime_replicas[ordinal] = replica
        return self._runtime_replicas[ordinal]


def world_here() -> World | None:
    """Returns this process's replicas on a CPU; their module starts a runtime, and is not imported for the question."""
    runtime = sys.modules.get("shardkit.backends.xla.runtime")
    return None if runtime is None else runtime.current_world()


def sleep(seconds: float) -> None:
    """``time.sleep``, in which other replicas run."""
    world = world_here()
    with nullcontext() if world is None else world.turns.given():
        time.sleep(seconds)


def has_accelerator() -> bool:
    """Says whether torch_xla would run on something other than the CPU here (without starting its runtime)."""
    chosen = os.environ.get("PJRT_DEVICE")
    if chosen:
        return chosen != "CPU"
    return importlib.util.find_spec("libtpu") is not None and bool(
        glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    )


def has_started() -> bool:
    """Says whether this process uses XLA's devices."""
    if "torch_xla" not in sys.modules:
        return False
    import torch_xla

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())
