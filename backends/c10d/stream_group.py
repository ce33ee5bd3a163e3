"""Groups whose collectives run on the device's streams.

[Note: waiting on a stream] NCCL runs on streams of its own. Waiting for one of its works makes the current stream wait
and the host goes on, so nothing here notices that a work does not come to its end (as gloo's slices of time do): NCCL's
watchdog ends such a job after the process group's timeout. What is noticed is another order of calls ([Note: call
order]): the rank that is about to issue what was not predicted waits for an agreement on the host. It finds that
another has gone on, and raises. That one raises when it issues something next; a host that waits for its device by then
is freed, by the end of all that is in flight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shardkit.backend import DONE, ReduceOp, Sizes, Work
from shardkit.errors import ConfigurationError
from shardkit.types import Tree

from ..diagnosis.stack_report import Call, CallFacts
from ..diagnosis.watchdog import Watch
from .connections import process_group_over
from .group import NUMBERS, OPS, After, C10dGroup, C10dWork, TorchWork, as_bytes, as_real

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
