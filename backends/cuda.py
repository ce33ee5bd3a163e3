"""CUDA devices, one process each: NCCL groups, and gloo groups that carry CUDA tensors.

[Note: waiting on a stream] NCCL runs on streams of its own. Waiting for one of its works makes the current stream wait
and the host goes on, so nothing here looks for ranks that are out of step (as gloo's slices of time do): NCCL's
watchdog ends such a job after the process group's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.backend import ReduceOp
from shardkit.errors import BackendError, ConfigurationError

from .c10d import C10dGroup
from .host import storage_bytes
from .known_groups import KnownGroups
from .processes import START_SECONDS, launch_processes
from .sizes import check_exchange, check_member, check_op, check_parts
from .waiting import DONE
from .watch import Call

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}
_CUDA = torch.device("cuda")


class CudaBackend:
    """CUDA tensors, one process a rank."""

    name = "cuda"
    device_type = "cuda"
    even_shards_only = False
    has_storage = True

    def __init__(self) -> None:
        self._groups = KnownGroups(self, _make_group)
        self._selected = False

    def is_available(self) -> bool:
        return torch.cuda.is_available() and dist.is_available()

    def device(self) -> torch.device:
        """The current CUDA device; the first call selects the one of ``LOCAL_RANK``, unless the caller chose another.

        Raises:
            BackendError: there is no CUDA device.
            ConfigurationError: more ranks on this machine than devices.
        """
        if not torch.cuda.is_available():
            raise BackendError(
                "no CUDA device is available (torch.cuda.is_available() is False): this torch was built without CUDA, "
                "or no device is visible"
            )
        if not self._selected:
            self._selected = True
            _select_device()
        return torch.device("cuda", torch.cuda.current_device())

    def group(self, process_group: Any = None) -> C10dGroup:
        """See :meth:`shardkit.backend.Backend.group`. Mixed groups ("cpu:gloo,cuda:nccl") use what serves CUDA."""
        return self._groups.of(process_group)

    # ------------------------------------------------------------ memory
    def take_storage(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(storage_bytes(tensor))

    def release_storage(self, tensor: torch.Tensor) -> None:
        """The memory goes back to the current stream's pool; other streams that use it have to be waited for before."""
        tensor.untyped_storage().resize_(0)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu().pin_memory()

    # ------------------------------------------------------------ overlap
    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device())

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record_event(self) -> torch.cuda.Event:
        """On the current stream; the event's own ``wait`` and ``synchronize`` are the protocol's."""
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark_step(self, *, wait: bool = False) -> None:
        """Nothing: execution is eager."""

    def tie(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: streams keep the order."""

    # ------------------------------------------------------------ random numbers
    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device())

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device())

    def launch(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        start_timeout: float | None = START_SECONDS,
    ) -> list[Any]:
        """Runs ``fn(rank, *args)`` in one process for each device, with an NCCL process group.

        Raises:
            ConfigurationError: fewer devices than ranks.
            RankFailedError: the first failing rank's error, at once.
        """
        count = torch.cuda.device_count()
        if world_size > count:
            raise ConfigurationError(
                f"{world_size} ranks need {world_size} CUDA devices, {count} are visible; launch fewer ranks, or use "
                "backend='gloo' on the CPU"
            )
        return launch_processes(fn, world_size, args, self.name, timeout, start_timeout)


def _select_device() -> None:
    local_rank = os.environ.get("LOCAL_RANK")
    count = torch.cuda.device_count()
    chosen = torch.cuda.is_initialized() and torch.cuda.current_device() != 0
    if (
        local_rank is None or chosen or count == 1
    ):  # with one device visible to each process, LOCAL_RANK says nothing
        return
    if int(local_rank) >= count:
        raise ConfigurationError(
            f"LOCAL_RANK is {local_rank}, but only {count} CUDA devices are visible; start at most {count} ranks on "
            "this machine"
        )
    torch.cuda.set_device(int(local_rank))


def _make_group(backend: Any, process_group: Any, ranks: Sequence[int], rank: int) -> C10dGroup:
    """NCCL's own form, or the one that gloo's CUDA tensors share with its CPU tensors."""
    if process_group is None:
        return C10dGroup(backend, None, ranks, rank)
    try:
        kind = process_group._get_backend(_CUDA).name()
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank}: the process group can't carry CUDA tensors ({error}); make it with backend 'nccl' or "
            "'cpu:gloo,cuda:nccl', or keep the module on the CPU"
        ) from error
    return (CudaGroup if kind == "nccl" else C10dGroup)(backend, process_group, ranks, rank)


class CudaWork:
    """NCCL works issued as one call; see [Note: waiting on a stream].

    The works keep the tensors that NCCL still reads, so that their memory is not given to others.
    """

    __slots__ = ("_after", "_call", "_group", "_works")

    def __init__(
        self, group: CudaGroup, works: list[Any], call: Call, after: Callable[[], None] | None
    ) -> None:
        self._group, self._works, self._call, self._after = group, works, call, after

    def is_done(self) -> bool:
        """Whether the device is through with it (asked of an event, without waiting)."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Work issued from now on in the current stream sees the result."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._group._raise(error, self._call)
        self._works = []
        after, self._after = self._after, None
        if after is not None:
            after()


class CudaGroup(C10dGroup):
    """Ranks of an NCCL process group. Buffers are used in place; nothing is copied for contiguous tensors."""

    ends_at_exit = False  # see _end_communicators

    def _probe(self, call: Call) -> None:
        """Nothing: a send of NCCL's would have to be received."""

    def _connect(self, store: Any, name: str, members: Sequence[int]) -> Any:
        """An NCCL communicator of these group ranks, known to them alone (as for gloo: see the base)."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = [self.ranks[r] for r in members]
        options.group_name = f"shardkit/{name}"
        rank, size = members.index(self.rank), len(members)
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        pg = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        pg._set_default_backend(kind)
        pg._register_backend(_CUDA, kind, nccl)
        pg._set_group_name(options.group_name)
        _communicators.add(nccl)
        return pg

    def _issue(
        self, works: list[Any], operation: str, numel: int, label: str, async_op: bool,
        after: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        self._sequence += 1
        work = CudaWork(self, works, Call(self._name, self._sequence, operation, numel, label), after)
        if not async_op:
            work.wait()
        return work

    # ------------------------------------------------------------ collectives
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        """[S] -> [N]; one NCCL all-gather, or for uneven sizes one broadcast a rank, grouped."""
        parts = check_parts("all_gather_into", self.rank, self.world_size, output, shard, sizes)
        if not output.numel():
            return DONE
        if _even(parts):
            work = self._start(self.process_group._allgather_base, output, shard)
        else:
            pieces = list(torch.split_with_sizes(output, parts))
            work = self._start(self.process_group.allgather, [pieces], [shard])
        return self._issue([work], "all_gather_into", output.numel(), label, async_op)

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        """[N] -> [S]; one NCCL reduce-scatter, or for uneven sizes one reduce a rank, grouped (and input is lost)."""
        parts = check_parts("reduce_scatter_into", self.rank, self.world_size, input, shard, sizes)
        check_op("reduce_scatter_into", self.rank, op, input.dtype)
        if not input.numel():
            return DONE
        options: Any = dist.distributed_c10d.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        if _even(parts):
            work = self._start(self.process_group._reduce_scatter_base, shard, input, options)
        else:
            pieces = list(torch.split_with_sizes(input, parts))
            work = self._start(self.process_group.reduce_scatter, [shard], [pieces], options)
        return self._issue([work], "reduce_scatter_into", input.numel(), label, async_op)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None, *, async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        """[sum(input_sizes)] -> [sum(output_sizes)]"""
        come, go = check_exchange(
            "all_to_all", self.rank, self.world_size, output, input, output_sizes, input_sizes
        )
        work = self._start(self.process_group.alltoall_base, output, input, come, go)
        return self._issue([work], "all_to_all", input.numel(), label, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Any:
        """In place, any shape."""
        check_op("all_reduce", self.rank, op, tensor.dtype)
        if not tensor.numel():
            return DONE
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        wire = tensor.contiguous()
        work = self._start(self.process_group.allreduce, [wire], options)
        return self._issue([work], "all_reduce", tensor.numel(), label, async_op, _copy_back(tensor, wire))

    def reduce(
        self, tensor: torch.Tensor, dst: int, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Any:  # fmt: skip
        """In place on ``dst``."""
        check_member("reduce", self.rank, self.world_size, dst)
        check_op("reduce", self.rank, op, tensor.dtype)
        if not tensor.numel():
            return DONE
        options: Any = dist.ReduceOptions()
        options.reduceOp = _OPS[op]
        options.rootRank = dst
        wire = tensor.contiguous()
        work = self._start(self.process_group.reduce, [wire], options)
        return self._issue(
            [work], f"reduce(dst={dst})", tensor.numel(), label, async_op, _copy_back(tensor, wire)
        )

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Any:
        """In place, any shape."""
        check_member("broadcast", self.rank, self.world_size, src)
        if not tensor.numel():
            return DONE
        wire = tensor.contiguous()
        work = self._start(self.process_group.broadcast, wire, src)
        return self._issue(
            [work], f"broadcast(src={src})", tensor.numel(), label, async_op, _copy_back(tensor, wire)
        )

    def barrier(self, *, label: str = "") -> None:
        """Blocks the host until all ranks are here and their earlier work on the current streams is done."""
        # not NCCL's own barrier, which guesses a device from the rank
        here = torch.zeros(1, device=self.backend.device())
        self.all_reduce(here, label=label or "barrier")
        torch.cuda.current_stream().synchronize()


def _even(parts: Sequence[int]) -> bool:
    return parts.count(parts[0]) == len(parts)


def _copy_back(tensor: torch.Tensor, wire: torch.Tensor) -> Callable[[], None] | None:
    """For tensors that could not travel as they are."""
    if wire is tensor:
        return None

    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(wire)

    return copy


# NCCL's threads have to end before the process does; torch ends only those of groups it made itself.
_communicators: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _end_communicators() -> None:
    for nccl in list(_communicators):
        with contextlib.suppress(RuntimeError):
            nccl.abort()  # nothing is in flight; unlike an orderly end it never waits for other ranks
