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
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardkit.backend import DONE, ReduceOp, Work
from shardkit.errors import ConfigurationError

from ..arguments import check_exchange, check_op, check_parts
from ..diagnosis.calls import Call
from ..diagnosis.watch import Watch
from .group import OPS, C10dGroup
from .waiting import C10dWork, TorchWork
from .wire import NUMBERS, as_bytes, as_real

_OPS = {**OPS, ReduceOp.AVG: dist.ReduceOp(dist.ReduceOp.AVG)}

_DTYPES = NUMBERS | {torch.bool}  # what NCCL adds up


class StreamWork(C10dWork):
    """Works issued as one call; see [Note: waiting on a stream].

    The works keep the tensors that the device still reads, so that their memory is not given to others. Whether the
    device is through with them is asked of an event, without waiting.
    """

    __slots__ = ()

    def wait(self) -> None:
        """Work issued from now on in the current stream sees the result."""
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
        """Nothing: a send would have to be received."""

    def _issue(
        self, works: list[TorchWork], operation: str, numel: int, label: str, async_op: bool,
        after: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        self._sequence += 1
        call = (self._name, self._sequence, operation, numel, label)
        watch = self._watch
        watch.issued[self._name] = self._sequence
        watch.recent.append(call)
        work = StreamWork(self, works, call, after)
        if watch.failed_elsewhere:
            watch.raise_failure(Call(*call))
        if not async_op:
            work.wait()
        return work

    # ------------------------------------------------------------ collectives
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """[S] -> [N]; one all-gather, or for uneven sizes one broadcast a rank, grouped."""
        parts = check_parts("all_gather_into", self.rank, self.world_size, output, shard, sizes)
        if not output.numel():
            return DONE
        numel = output.numel()
        self._follow("all_gather_into", numel, label)
        if output.dtype not in _DTYPES:
            parts = [n * output.element_size() for n in parts]
            output, shard = as_bytes(output), as_bytes(shard)
        if _even(parts):
            work = self._start(self.process_group._allgather_base, output, shard)
        else:
            pieces = list(torch.split_with_sizes(output, parts))
            work = self._start(self.process_group.allgather, [pieces], [shard])
        return self._issue([work], "all_gather_into", numel, label, async_op)

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """[N] -> [S]; one reduce-scatter, or for uneven sizes one reduce a rank, grouped (and input is lost)."""
        parts = check_parts("reduce_scatter_into", self.rank, self.world_size, input, shard, sizes)
        check_op("reduce_scatter_into", self.rank, op, input.dtype)
        if input.is_complex():
            parts = [2 * n for n in parts]
            shard, input = as_real(shard), as_real(input)
        self._check_sum("reduce_scatter_into", input)
        if not input.numel():
            return DONE
        options = dist.distributed_c10d.ReduceScatterOptions()
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
    ) -> Work:  # fmt: skip
        """[sum(input_sizes)] -> [sum(output_sizes)]"""
        come, go = check_exchange(
            "all_to_all", self.rank, self.world_size, output, input, output_sizes, input_sizes
        )
        numel = input.numel()
        if input.dtype not in _DTYPES:
            size = input.element_size()
            come, go = [n * size for n in come], [n * size for n in go]
            output, input = as_bytes(output), as_bytes(input)
        work = self._start(self.process_group.alltoall_base, output, input, come, go)
        return self._issue([work], "all_to_all", numel, label, async_op)

    def barrier(self, *, label: str = "") -> None:
        """Blocks the host until all ranks are here and their earlier work on the current streams is done."""
        # not the library's own barrier: NCCL's guesses a device from the rank
        here = torch.zeros(1, device=self.backend.device())
        self.all_reduce(here, label=label or "barrier")
        torch.accelerator.current_stream(here.device).synchronize()

    def _check_sum(self, operation: str, tensor: torch.Tensor) -> None:
        """Raises ConfigurationError for what the library can carry but not add up."""
        if tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"rank {self.rank}: {operation} of {tensor.dtype} is not possible on {self.backend.device_type}: its "
                "library does not add up such numbers; convert them to int32, int64 or a floating point dtype first"
            )


def _even(parts: Sequence[int]) -> bool:
    return parts.count(parts[0]) == len(parts)
